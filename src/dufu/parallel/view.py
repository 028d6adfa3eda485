"""What each process takes of a batch where several share the positions of every sample: padding to a length that divides, and slicing.

Under context parallelism the samples are cut into twice as many chunks as there are processes; process r holds chunk r and the r-th
from the end. A query of a late chunk attends to many keys and one of an early chunk to few, so each process has equal work under a
causal mask. Other masks use the same rule.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.errors import ConfigError, LayoutError, NotBuiltError
from dufu.layers.loss import IGNORE
from dufu.layers.mask import Held
from dufu.layers.position import LearnedPositionalEmbedding, SinePositionalEmbedding
from dufu.models.chain import Batch, ChainModel
from dufu.parallel import faults
from dufu.parallel.collectives import alone


class Divided(Protocol):
    """A seam that divides positions only while `active`."""

    active: bool


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return which two of the 2 · size chunks of a sample a process holds, in their order there."""
    return rank, 2 * size - 1 - rank


def places_of(rank: int, size: int, total: int) -> Tensor:
    """Return the places (total / size,) of the tokens that a process holds; `total` is a multiple of 2 · size."""
    length = total // (2 * size)
    return torch.cat([torch.arange(chunk * length, (chunk + 1) * length) for chunk in chunks_of(rank, size)])


class BatchView:
    """A model's view of its batches; see `view_of`.

    Only a batch that is scored is divided. Generation, with or without caches, runs whole on every process, and the seams are told.

    Args:
        model: whose batches.
    """

    def __init__(self, model: ChainModel) -> None:
        self.causal = model.causal
        self.context = alone("context")
        self.stretches = 1  # of the tokens of a process, shared among the tensor-parallel ones
        self.all_rows = False  # whether attention computes queries of tokens that are not held
        self.seams: list[Divided] = []
        tables = (LearnedPositionalEmbedding, SinePositionalEmbedding)
        self.longest = min((m.longest for m in model.modules() if isinstance(m, tables)), default=None)

    @property
    def multiple(self) -> int:
        """Return what the length of a sample is padded to a multiple of."""
        size = self.context.size
        return size * math.lcm(2 if size > 1 else 1, self.stretches)

    def __call__(self, batch: Batch) -> Batch:
        """Return this process's tokens of the batch; what has been returned is returned as it is.

        Raises:
            LayoutError: more tokens than the model has positions.
            ConfigError, NotBuiltError: the batch holds something that cannot be cut.
        """
        divided = batch.is_scored and batch.caches is None
        for seam in self.seams:
            seam.active = divided
        if not divided:
            return batch
        decoder = None if batch.decoder is None else self._divide(batch.decoder, causal=True)
        return self._divide(batch if decoder is batch.decoder else replace(batch, decoder=decoder), self.causal)

    def _divide(self, batch: Batch, causal: bool) -> Batch:
        if batch.held is not None:
            return batch
        length = batch.input_ids.shape[1]
        if self.longest is not None and length > self.longest:
            raise LayoutError(f"{length} tokens do not fit into max_seq_length={self.longest}")
        padded = -(-length // self.multiple) * self.multiple
        if padded == length and self.context.size == 1:
            return batch
        if batch.mask is not None:
            raise ConfigError("a batch whose samples are shared has a mask of its own; give padding or documents instead")
        _check_extra(batch, length)
        if batch.positions is None:
            batch = replace(batch, positions=torch.arange(length, device=batch.input_ids.device).expand_as(batch.input_ids))
        if padded != length:
            batch = _padded(batch, padded - length, causal)
        return batch if self.context.size == 1 else self._slice(batch)

    def _slice(self, batch: Batch) -> Batch:
        context, total = self.context, batch.input_ids.shape[1]
        places = places_of(context.rank, context.size, total).to(batch.input_ids.device)

        def mine(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.index_select(1, places)

        keys, positions = mine(batch.keys), mine(batch.positions)
        if faults.active("context.dropout_by_rank") and keys is not None:
            keys = keys + context.rank
        if faults.active("context.shifted_positions") and positions is not None:
            positions = torch.arange(len(places), device=places.device).expand_as(positions)
        held = Held(places, total, None if self.all_rows else places, batch.keys)
        extra = {name: self._labels(name, value, places) for name, value in batch.extra.items()}
        ids = batch.input_ids.index_select(1, places)
        return replace(
            batch, input_ids=ids, labels=mine(batch.labels), positions=positions, keys=keys, token_types=mine(batch.token_types),
            extra=extra, held=held,
        )  # fmt: skip

    def _labels(self, name: str, value: Tensor, places: Tensor) -> Tensor:
        if not name.endswith("labels"):
            return value
        if value.dim() > 1:
            return value.index_select(1, places)
        # The first process holds the first token, from which a label of the whole sample is judged.
        return value if self.context.rank == 0 else torch.full_like(value, IGNORE)


def _check_extra(batch: Batch, length: int) -> None:
    for name, value in batch.extra.items():
        if value.dim() > 1 and value.shape[1] == length and not (name.endswith("labels") and value.dim() == 2):
            raise NotBuiltError(
                f'samples that processes share by position may not have a field "{name}" {tuple(value.shape)}, which seems to hold '
                f"something of each of {length} tokens; only fields whose names end in labels are cut"
            )


def _padded(batch: Batch, count: int, causal: bool) -> Batch:
    """Add tokens at the end that nothing real attends to and that are not scored.

    A causal mask needs no padding to hide them; `extra["lengths"]` (B,) then says how many tokens are real.
    """

    def longer(x: Tensor | None, value: int) -> Any:
        return None if x is None else functional.pad(x, (0, count), value=value)

    padding = batch.padding
    if padding is None and not causal and batch.documents is None:
        padding = torch.ones_like(batch.input_ids, dtype=torch.bool)
    extra = {k: longer(v, IGNORE) if k.endswith("labels") and v.dim() > 1 else v for k, v in batch.extra.items()}
    if padding is None:
        extra["lengths"] = torch.full_like(batch.input_ids[:, 0], batch.input_ids.shape[1])
    return replace(
        batch, input_ids=longer(batch.input_ids, 0), labels=longer(batch.labels, IGNORE), positions=longer(batch.positions, 0),
        keys=longer(batch.keys, 0), padding=longer(padding, 0), documents=longer(batch.documents, -1),
        token_types=longer(batch.token_types, 0), extra=extra,
    )  # fmt: skip


def view_of(model: nn.Module, what: str) -> BatchView:
    """Return the model's view, putting one in the place of the plain one.

    Raises:
        LayoutError: the model takes no dufu batches, or its positions cannot be shared; `what` says what needs them.
    """
    if not isinstance(model, ChainModel):
        raise LayoutError(f"{what} divides the positions of a ChainModel's batches; {type(model).__name__} is none")
    if not getattr(model, "shares_positions", True):
        raise LayoutError(f"{what}: {type(model).__name__} mixes positions in other ways than attention over all; leave it out")
    if not isinstance(model.view, BatchView):
        model.view = BatchView(model)  # type: ignore[method-assign]
    view: BatchView = model.view  # type: ignore[assignment]
    return view
