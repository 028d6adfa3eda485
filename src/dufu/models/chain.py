"""A model is a chain of named units: embedding, layers, head. Calling the model runs the chain; a pipeline stage is a slice of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from dufu.layers.attention import KeyValueCache
from dufu.layers.dropout import name_places
from dufu.layers.loss import IGNORE
from dufu.layers.mask import Held, Mask, build_mask
from dufu.layers.transformer import TransformerLayer


@dataclass
class Batch:
    """What the units read beside the hidden states.

    Where several processes share each sample (`held`), T is the tokens that this process holds and S those of the whole sample;
    otherwise they are the same.

    Args:
        input_ids: (B, T).
        labels: (B, T), `loss.IGNORE` where nothing is scored; None asks for scores instead of the loss.
        positions: (B, T) position of each token in its sample.
        keys: (B, T) dropout keys; None outside training.
        padding: (B, S) bool, true for real tokens; None when none is padding.
        documents: (B, S) number of the document of each token, where attention must not cross documents.
        token_types: (B, T) segment numbers.
        extra: further tensors of one model family, such as a sentence label.
        caches: one per layer during generation.
        last_only: score the last position only.
        mask: built once for all layers.
        held: which tokens of its samples this process holds; None = all.
        decoder: in an encoder-decoder model the decoder's own batch; this one is then the encoder's, and its caches keep what the
            decoder's layers attend to of it.
        memory_mask: in the decoder's batch, what it may attend to of the encoder's output.
        encoded: the caches already hold all that the decoder needs of the encoder, whose units have nothing to do.
    """

    input_ids: Tensor
    labels: Tensor | None = None
    positions: Tensor | None = None
    keys: Tensor | None = None
    padding: Tensor | None = None
    documents: Tensor | None = None
    token_types: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    caches: list[KeyValueCache] | None = None
    last_only: bool = False
    mask: Mask | None = None
    held: Held | None = None
    decoder: Batch | None = None
    memory_mask: Mask | None = None
    encoded: bool = False

    @property
    def places(self) -> Tensor | None:
        """Return the places (T,) that the tokens here have in the whole samples, or None where the samples are whole."""
        return None if self.held is None else self.held.places

    @property
    def length(self) -> int:
        """Return the tokens of a whole sample, padding included."""
        return self.input_ids.shape[1] if self.held is None else self.held.total

    @property
    def scored_labels(self) -> Tensor | None:
        """Return the labels of what the head scores: in an encoder-decoder model those of the decoder."""
        return self.labels if self.decoder is None else self.decoder.labels

    @property
    def is_scored(self) -> bool:
        """Say whether there are labels of any kind."""
        own = self.labels is not None or any(name.endswith("labels") for name in self.extra)
        return own or (self.decoder is not None and self.decoder.is_scored)

    def without_labels(self) -> Batch:
        """Return the batch without labels of any kind, to which a model answers with scores."""
        extra = {name: value for name, value in self.extra.items() if not name.endswith("labels")}
        return replace(self, labels=None, extra=extra, decoder=self.decoder and self.decoder.without_labels())

    def to(self, device: torch.device) -> Batch:
        """Return the batch with its tensors on a device."""
        moved: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                moved[item.name] = value.to(device, non_blocking=True)
            elif isinstance(value, Batch):
                moved[item.name] = value.to(device)
        moved["extra"] = {k: v.to(device, non_blocking=True) for k, v in self.extra.items()}
        return replace(self, **moved)


Sums = dict[str, Tensor]


class TransformerUnit(nn.Module):
    """A transformer layer as a unit of the chain.

    Args:
        index: number of the layer, for its cache.
        arguments: those of TransformerLayer.
    """

    def __init__(self, index: int, **arguments: Any) -> None:
        super().__init__()
        self.index = index
        self.block = TransformerLayer(**arguments)

    def forward(self, state: Tensor, batch: Batch) -> Tensor:
        """(B, T, H) → (B, T, H)."""
        assert batch.mask is not None
        cache = batch.caches[self.index] if batch.caches else None
        hidden: Tensor = self.block(state, batch.mask, batch.keys, cache=cache)
        return hidden


class ChainModel(nn.Module):
    """Base of dufu's models. A subclass sets its parts in `__init__`, calls `finish()`, and says what its units are.

    A head that sees labels returns sums: `loss` (summed over scored tokens), `tokens` (their count), and what metrics need.
    """

    causal = True
    objectives: dict[str, str] = {"loss": "tokens"}  # noqa: RUF012 - each summed loss and the count that divides it

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return how much each objective scores in a batch, from its labels alone: known before any forward."""
        labels = batch.scored_labels
        return {"tokens": 0 if labels is None else int((labels != IGNORE).sum())}

    def units(self) -> dict[str, nn.Module]:
        """Return the units in order, by name. Each is called as `unit(state, batch)` and returns the next state."""
        raise NotImplementedError

    def view(self, batch: Batch) -> Batch:
        """Return what this process takes of a batch: all of it; `dufu.parallel` puts another function in its place.

        What it returns it returns again unchanged.
        """
        return batch

    def new_caches(self) -> list[KeyValueCache]:
        """Return empty caches for generation, one a layer."""
        return [KeyValueCache() for _ in range(len(self.units()) - 2)]

    def finish(self) -> None:
        """Name the dropout places; the last line of a subclass's `__init__`."""
        name_places(self)

    def prepare(self, batch: Batch) -> Batch:
        """Take this process's view of the batch; fill in positions and the attention mask."""
        batch = self.view(batch)
        length = batch.input_ids.shape[1]
        if batch.positions is None:
            batch.positions = torch.arange(length, device=batch.input_ids.device).expand_as(batch.input_ids)
        if batch.mask is None:
            past = next((c.keys for c in batch.caches or () if c.keys is not None), None)  # of the layers that run here
            total = length + (0 if past is None else past.shape[2])
            batch.mask = build_mask(
                causal=self.causal,
                queries=length,
                keys=total if batch.held is None else batch.held.total,
                padding=batch.padding,
                documents=batch.documents,
                device=batch.input_ids.device,
                held=batch.held,
            )
        return batch

    def forward(self, batch: Batch) -> Any:
        """Run the chain: sums when the batch has labels, otherwise scores (B, T or 1, V)."""
        batch = self.prepare(batch)
        state: Any = None
        for unit in self.units().values():
            state = unit(state, batch)
        return state
