"""A model that sees both sides as one ONNX graph: BERT, RoBERTa and ALBERT for words, sentence pairs, classes or hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dufu.models.bert.heads import BertHead, ClassifierHead, FeaturesHead
from dufu.models.chain import Batch, ChainModel
from dufu.onnx.graph import BATCH, LENGTH, Axes, Graph, Trial, made_up_ids, made_up_masks

# What the score of the sentence pair is called, where it is not BERT's name.
_PAIRS = {"Albert": "sop_logits"}


class EncoderGraph(Graph):
    """input_ids, attention_mask and, where the model has segments, token_type_ids (B, T) → what the head makes of them.

    Scores of words (B, T, V), with those of the pair (B, 2) beside in pre-training; scores of classes (B, C); or hidden states (B, T, H)
    and the pooled first token (B, H).
    """

    model: ChainModel

    def __init__(self, model: ChainModel) -> None:
        super().__init__(model)
        self.vocabulary, self.longest = int(model.vocab_size), int(model.max_seq_length)  # type: ignore[arg-type]
        segments: Any = getattr(model.embedding, "token_type", None)
        self.segments = 0 if segments is None else int(segments.num_embeddings)

    @property
    def head(self) -> Any:
        """Return the last unit."""
        return list(self.model.units().values())[-1]

    def inputs(self) -> dict[str, Axes]:
        """See Graph."""
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if self.segments else [])]
        return {name: {0: BATCH, 1: LENGTH} for name in names}

    def outputs(self) -> dict[str, Axes]:
        """See Graph."""
        head, each, whole = self.head, {0: BATCH, 1: LENGTH}, {0: BATCH}
        if isinstance(head, FeaturesHead):
            return {"last_hidden_state": each, **({} if head.pooler is None else {"pooler_output": whole})}
        if isinstance(head, BertHead) and head.sentence is not None:
            return {"prediction_logits": each, _PAIRS.get(type(self.model).__name__, "seq_relationship_logits"): whole}
        return {"logits": whole if isinstance(head, ClassifierHead) else each}

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """See Graph."""
        input_ids, attention_mask, *types = tensors
        batch = self.model.prepare(Batch(input_ids, padding=attention_mask.bool(), token_types=types[0] if types else None))
        *units, head = self.model.units().values()
        state: Any = None
        for unit in units:
            state = unit(state, batch)
        found: list[Tensor] = [head(state, batch)]
        if isinstance(head, FeaturesHead) and head.pooler is not None:
            found.append(head.pooled(found[0]))
        if isinstance(head, BertHead) and head.pooler is not None and head.sentence is not None:
            found.append(head.sentence(head.pooler(state if head.norm is None else head.norm(state))))
        return found

    def traced(self) -> Trial:
        """See Graph."""
        return self._trial(2, 3, "all tokens")

    def _trial(self, batch: int, length: int, kind: str) -> Trial:
        tensors = [made_up_ids(batch, length, self.vocabulary), made_up_masks(batch, length)[kind]]
        if self.segments:
            tensors.append(torch.arange(length).expand(batch, length) * 2 // max(length, 1) % self.segments)
        return Trial(f"{batch} × {length} tokens, {kind}", tensors)

    def trials(self) -> Iterator[Trial]:
        """See Graph: short and long, one and several rows, every kind of mask."""
        for batch, length in ((1, 1), (3, 7), (1, 33)):
            yield self._trial(batch, min(length, self.longest), "all tokens")
        for kind in ("padding on the left", "padding on the right", "holes"):
            yield self._trial(2, min(5, self.longest), kind)
