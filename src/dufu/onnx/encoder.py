"""A model that sees both sides as one ONNX graph: BERT and RoBERTa for words, sentence pairs or classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dufu.models.chain import Batch, ChainModel
from dufu.onnx.graph import BATCH, LENGTH, Axes, Graph, Trial, made_up_ids, made_up_masks


class EncoderGraph(Graph):
    """input_ids, attention_mask and, where the model has segments, token_type_ids (B, T) → scores of words (B, T, V) or of classes (B, C).

    A model for pre-training gives `prediction_logits` and `seq_relationship_logits` (B, 2), the others `logits`.
    """

    model: ChainModel

    def __init__(self, model: ChainModel) -> None:
        super().__init__(model)
        self.vocabulary, self.longest = int(model.vocab_size), int(model.max_seq_length)  # type: ignore[arg-type]
        segments = getattr(model.embedding, "token_type", None)
        self.segments = 0 if segments is None else int(segments.num_embeddings)
        head = list(model.units().values())[-1]
        self.judges_pairs = getattr(head, "sentence", None) is not None
        self.pools = hasattr(head, "classes")

    def inputs(self) -> dict[str, Axes]:
        """See Graph."""
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if self.segments else [])]
        return {name: {0: BATCH, 1: LENGTH} for name in names}

    def outputs(self) -> dict[str, Axes]:
        """See Graph."""
        if self.judges_pairs:
            return {"prediction_logits": {0: BATCH, 1: LENGTH}, "seq_relationship_logits": {0: BATCH}}
        return {"logits": {0: BATCH} if self.pools else {0: BATCH, 1: LENGTH}}

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """See Graph."""
        input_ids, attention_mask, *types = tensors
        batch = self.model.prepare(Batch(input_ids, padding=attention_mask.bool(), token_types=types[0] if types else None))
        *units, last = self.model.units().values()
        head: Any = last
        state: Any = None
        for unit in units:
            state = unit(state, batch)
        scores = [head(state, batch)]
        if self.judges_pairs:
            normed = state if head.norm is None else head.norm(state)
            scores.append(head.sentence(head.pooler(normed)))
        return scores

    def _trial(self, batch: int, length: int, kind: str) -> Trial:
        tensors = [made_up_ids(batch, length, self.vocabulary), made_up_masks(batch, length)[kind]]
        if self.segments:
            tensors.append(torch.arange(length).expand(batch, length) * 2 // max(length, 1) % self.segments)
        return Trial(f"{batch} × {length} tokens, {kind}", tensors)

    def trials(self) -> Iterator[Trial]:
        """See Graph: short and long, one and several rows, every kind of mask."""
        yield self._trial(2, 3, "all tokens")
        for batch, length in ((1, 1), (3, 7), (1, 33)):
            yield self._trial(batch, min(length, self.longest), "all tokens")
        for kind in ("padding on the left", "padding on the right", "holes"):
            yield self._trial(2, min(5, self.longest), kind)
