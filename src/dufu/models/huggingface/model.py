"""A transformers model as it is, as a chain of units that runs in dufu's layouts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.errors import ConfigError, LayoutError, NotBuiltError
from dufu.layers.loss import IGNORE, cross_entropy_sum
from dufu.layers.mask import build_mask
from dufu.models.chain import Batch, ChainModel, Sums
from dufu.models.huggingface.build import build_network
from dufu.models.huggingface.outline import Call, NoChain, Outline, outline_of
from dufu.models.huggingface.plans import install_plan
from dufu.models.huggingface.randomness import install_dropout

# What the end of a class's name says of its objective.
_TOKENS = ("ForMaskedLM", "ForTokenClassification")
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_SAMPLES = ("ForSequenceClassification",)
_HELD = "_outline"  # where a batch keeps the inputs and the blocks' arguments that were made of it


class _Ends(nn.Module):
    """The first or the last unit: what lies before or after the blocks.

    Args:
        owners: modules whose own parameters belong to the unit.
        chain: the model.
    """

    def __init__(self, owners: list[nn.Module], chain: OutsideModel) -> None:
        super().__init__()
        self._far: tuple[list[nn.Module], OutsideModel] = (owners, chain)  # in a tuple, so that nothing of it is a submodule

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters that the unit uses."""
        yield from (p for module in self._far[0] for p in module._parameters.values() if p is not None)

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Yield the modules that the parameters belong to."""
        yield from self._far[0]


class _First(_Ends):
    def forward(self, state: None, batch: Batch) -> Tensor:
        """Token numbers → (B, T, H)."""
        chain = self._far[1]
        assert chain.outline is not None
        chain.keys.now = batch.keys
        return chain.outline.first_state(chain.inputs(batch))


class _Block(nn.Module):
    """One of the model's blocks."""

    def __init__(self, block: nn.Module, index: int, chain: OutsideModel) -> None:
        super().__init__()
        self.block, self.index = block, index
        self._far: tuple[OutsideModel] = (chain,)

    def forward(self, state: Tensor, batch: Batch) -> Tensor:
        """(B, T, H) → (B, T, H)."""
        (chain,) = self._far
        others, named = chain.calls(batch)[self.index]
        chain.keys.now = batch.keys
        output = self.block(state, *others, **named)
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden


class _Last(_Ends):
    def forward(self, state: Tensor, batch: Batch) -> Tensor | Sums:
        """(B, T, H) → sums, or scores."""
        chain = self._far[1]
        assert chain.outline is not None
        chain.keys.now = batch.keys
        return chain.score(chain.outline.result(chain.inputs(batch), state), batch)


class _All(_Ends):
    """The whole model as one unit, where its blocks form no chain."""

    def forward(self, state: None, batch: Batch) -> Tensor | Sums:
        """Token numbers → sums, or scores."""
        chain = self._far[1]
        chain.keys.now = batch.keys
        return chain.score(chain.network(**chain.inputs(batch)), batch)


class OutsideModel(ChainModel):
    """A transformers model as a chain of units. Parameters keep the names that they have there.

    Args:
        network: the model, which is changed in place: dropouts and the layers of its tensor-parallel plan get dufu's seams.

    Raises:
        NotBuiltError: an objective that is not built. ConfigError: a dropout that a layout would change.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        config: Any = network.config
        self.config = config
        self.kind = type(network).__name__
        self.by_sample = self.kind.endswith(_SAMPLES)
        if not self.kind.endswith((*_TOKENS, *_CAUSAL, *_SAMPLES)):
            ends = ", ".join((*_CAUSAL, *_TOKENS, *_SAMPLES))
            raise NotBuiltError(f"{self.kind}: its objective is not built; classes whose names end in {ends} are trained")
        if self.by_sample and config.problem_type not in (None, "regression", "single_label_classification"):
            raise NotBuiltError(f"{self.kind}: problem_type={config.problem_type!r} is not built")
        text = config.get_text_config()
        self.causal = self.kind.endswith(_CAUSAL)
        self.objectives = {"loss": "sentences" if self.by_sample else "tokens"}
        self.vocab_size, self.hidden_layers = int(text.vocab_size), int(text.num_hidden_layers)
        self.max_seq_length = int(getattr(text, "max_position_embeddings", None) or 1 << 30)
        self._accepted = set(inspect.signature(type(network).forward).parameters)
        self.keys = install_dropout(network)
        install_plan(network)
        self.outline: Outline | None = None
        self.why_no_chain = ""
        small = torch.ones(2, 3, dtype=torch.int64, device="cpu")
        try:
            self.outline = outline_of(network, self._arguments({"input_ids": small}))
        except NoChain as error:
            self.why_no_chain = str(error)
        self._units = self._make_units()
        self.finish()

    def _make_units(self) -> tuple[dict[str, nn.Module]]:
        outline = self.outline
        if outline is None:
            return ({"model": _All([m for m in self.network.modules() if m._parameters], self)},)
        blocks = {f"{outline.name}.{i}": _Block(block, i, self) for i, block in enumerate(outline.blocks)}
        return ({"embedding": _First(outline.before, self), **blocks, "head": _Last(outline.after, self)},)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Name modules, and so parameters, as the transformers model does."""
        yield from self.network.named_modules(memo, prefix, remove_duplicate)

    def units(self) -> dict[str, nn.Module]:
        """See ChainModel."""
        return self._units[0]

    def check_layout(self, layout: Any) -> None:
        """Raise LayoutError where a layout asks for what an unmodified model does not have.

        Args:
            layout: a ParallelLayout.
        """
        if layout.context > 1 or layout.sequence:
            key = "context_parallel_size" if layout.context > 1 else "sequence_parallel"
            raise LayoutError(
                f"train.dist.{key}: an unmodified {self.kind} has whole samples on each process; dufu's own models divide them"
            )
        if layout.expert > 1:
            raise LayoutError(
                f"train.dist.expert_parallel_size={layout.expert}: an unmodified {self.kind} has its experts on each process"
            )
        if layout.pipeline > 1 and self.outline is None:
            raise LayoutError(f"train.dist.pipeline_parallel_size={layout.pipeline}: {self.why_no_chain}")
        if layout.tensor > 1:
            self.network.check_split(layout.tensor)  # type: ignore[operator]

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch as it is; the model itself makes positions and masks.

        Raises:
            NotBuiltError: caches.
        """
        if batch.caches is not None:
            raise NotBuiltError(
                f"{self.kind}: dufu's generation from an unmodified transformers model is not built; take transformers' generate() on the "
                f"exported folder, or dufu's own family of the model (model=FOLDER)"
            )
        return batch

    def counts(self, batch: Batch) -> dict[str, int]:
        """See ChainModel."""
        if not self.by_sample:
            return super().counts(batch)
        labels = batch.extra.get("sentence_labels")
        return {"sentences": 0 if labels is None else int((labels != IGNORE).sum())}

    def _arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        chosen = {name: value for name, value in given.items() if value is not None}
        return {**chosen, **({"use_cache": False} if "use_cache" in self._accepted else {}), "return_dict": True}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the model's forward for a batch."""
        held = vars(batch).setdefault(_HELD, {})
        if "inputs" not in held:
            mask = None if batch.padding is None else batch.padding.long()
            if batch.documents is not None:
                mask = self._documents_mask(batch)
            types = batch.token_types
            if types is not None and "token_type_ids" not in self._accepted:
                raise ConfigError(f"{self.kind} takes no token types; use a dataset without them")
            given = {"input_ids": batch.input_ids, "attention_mask": mask, "position_ids": batch.positions, "token_type_ids": types}
            held["inputs"] = self._arguments(given)
        found: dict[str, Any] = held["inputs"]
        return found

    def _documents_mask(self, batch: Batch) -> Tensor | None:
        if getattr(self.config.get_text_config(), "sliding_window", None):
            raise NotBuiltError(f"{self.kind}: documents kept apart under a sliding window")
        length = batch.input_ids.shape[1]
        device = batch.input_ids.device
        mask = build_mask(
            causal=self.causal, queries=length, keys=length, padding=batch.padding, documents=batch.documents, device=device
        )
        return mask.dense(length, length, device)

    def calls(self, batch: Batch) -> list[Call]:
        """Return the arguments of each block beside the state."""
        held = vars(batch).setdefault(_HELD, {})
        if "calls" not in held:
            assert self.outline is not None
            held["calls"] = self.outline.calls(self.inputs(batch))
        found: list[Call] = held["calls"]
        return found

    def score(self, output: Any, batch: Batch) -> Tensor | Sums:
        """Return the sums of a batch with labels, otherwise the scores."""
        scores: Tensor = output.logits
        if self.by_sample:
            return scores if "sentence_labels" not in batch.extra else self._score_samples(scores, batch)
        if batch.labels is None:
            return scores[:, -1:] if batch.last_only else scores
        flat, labels = scores.flatten(0, 1), batch.labels.flatten()
        scored = labels != IGNORE
        sums: Sums = {"loss": cross_entropy_sum(flat, labels), "tokens": scored.sum()}
        if not self.training:
            sums["correct"] = ((flat.detach().argmax(-1) == labels) & scored).sum()
        return sums

    def _score_samples(self, scores: Tensor, batch: Batch) -> Sums:
        labels = batch.extra["sentence_labels"]
        scored = labels != IGNORE
        tokens = scored.sum() * batch.length if batch.padding is None else (batch.padding.bool() & scored[:, None]).sum()
        sums: Sums = {"sentences": scored.sum(), "tokens": tokens}
        if scores.shape[-1] == 1:
            error = (scores[:, 0].float() - labels.float()).masked_fill(~scored, 0.0)
            return {"loss": error.square().sum(), **sums}
        right = ((scores.detach().argmax(-1) == labels) & scored).sum()
        return {"loss": cross_entropy_sum(scores, labels), **sums, "sentences_correct": right}


@register_model("huggingface")
class HuggingFace(OutsideModel):
    """An unmodified transformers model out of a Hugging Face folder.

    A run begins with the folder's weights. It runs in dp, tp, ZeRO, with recomputation, and in pp where its blocks form a chain.

    Args:
        folder: with config.json and the weights.
        architecture: transformers' class, such as BertForSequenceClassification; None = the one that config.json names.
        config: fields that replace those of config.json, such as a dropout.
        from_scratch: begin with random weights; the folder then needs none.
        vocab_size: words that the tokenizer has; None = not compared with the model's.
        max_seq_length: longest sample in tokens; None = the model's.

    Raises:
        CheckpointError: no such folder, or a config.json that transformers does not take.
        ConfigError: no such class, or fewer words than the tokenizer has.
    """

    @configurable
    def __init__(
        self,
        folder: str,
        architecture: str | None = None,
        config: dict[str, Any] | None = None,
        from_scratch: bool = False,
        vocab_size: int | None = None,
        max_seq_length: int | None = None,
    ) -> None:
        super().__init__(build_network(Path(folder), architecture, config or {}))
        self.folder = folder
        if vocab_size is not None and vocab_size > self.vocab_size:
            raise ConfigError(
                f"{folder}: the model has {self.vocab_size} words, the tokenizer {vocab_size}; take the folder's tokenizer"
            )
        if max_seq_length is not None:
            if max_seq_length > self.max_seq_length:
                raise LayoutError(f"model.cfg.max_seq_length={max_seq_length}: {folder} has {self.max_seq_length} positions")
            self.max_seq_length = max_seq_length


__all__ = ["HuggingFace", "OutsideModel"]
