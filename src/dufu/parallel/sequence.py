"""Sequence parallelism (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022).

Between split layers each tensor-parallel process holds one stretch of positions of the residual stream, so that norms, dropouts and
residuals, and the activations that they keep, are divided too. A column-split layer gathers the positions of its input and a row-split
layer scatters its sum over them. An all-reduce is a reduce-scatter and an all-gather: what is sent stays the same.

The last unit of the chain, the head, gets its state whole.

With E the bytes of the whole stream of a micro-batch, B · T · H numbers, on p processes: gathering hands E / p to all_gather forward
and E to reduce_scatter backward; scattering the other way round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dufu.errors import LayoutError
from dufu.layers.dropout import Dropout
from dufu.layers.embedding import Embedding, VocabEmbedding
from dufu.layers.position import SinePositionalEmbedding
from dufu.parallel import faults
from dufu.parallel.collectives import Communicator
from dufu.parallel.tensor import TensorSplit
from dufu.parallel.view import view_of


def _gathered(x: Tensor, communicator: Communicator) -> Tensor:
    """Concatenate the processes' stretches: (B, t, …) → (B, T, …)."""
    x = x.contiguous()
    parts = torch.empty((communicator.size, *x.shape), dtype=x.dtype, device=x.device)
    communicator.gather_into(parts.view(-1), x.view(-1))
    return parts.transpose(0, 1).flatten(1, 2)


def _scattered(x: Tensor, communicator: Communicator) -> Tensor:
    """Sum over the processes and keep this one's stretch: (B, T, …) → (B, t, …)."""
    parts = x.unflatten(1, (communicator.size, -1)).transpose(0, 1).contiguous()
    return communicator.reduce_scatter(parts.view(-1), x.dtype).view(parts.shape[1:])


def _own(x: Tensor, communicator: Communicator) -> Tensor:
    return x.chunk(communicator.size, 1)[communicator.rank]


class _Gather(torch.autograd.Function):
    """Gather positions forward; sum the gradients and scatter them backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return _gathered(x, communicator)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if faults.active("sequence.skip_scatter"):
            return _own(grad, ctx.communicator), None
        return _scattered(grad, ctx.communicator), None


class _Scatter(torch.autograd.Function):
    """Sum and scatter positions forward; gather the gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return _scattered(x, communicator)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.communicator), None


class _GatherForAll(torch.autograd.Function):
    """Gather positions forward for what every process computes alike; keep the own stretch of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return _gathered(x, communicator)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own(grad, ctx.communicator), None


class SequenceSplit(TensorSplit):
    """A tensor split whose undivided side is divided by position; while not `active` it is a TensorSplit.

    Positions are dimension 1 of everything, and divide evenly.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        self.active = False

    # Messages are no part of a compiled graph: it ends before each and goes on after it.
    @torch.compiler.disable
    def enter(self, x: Tensor) -> Tensor:
        """Gather the positions of (B, t, …); the gradient is summed and scattered."""
        if not self.active:
            y: Tensor = super().enter(x)
            return y
        y = _Gather.apply(_as_computed(x), self.communicator)
        return y

    @torch.compiler.disable
    def leave(self, x: Tensor) -> Tensor:
        """Sum the parts' partial results (B, T, …) and keep the own positions; the gradient is gathered."""
        if not self.active:
            y: Tensor = super().leave(x)
            return y
        y = _Scatter.apply(x, self.communicator)
        return y

    def share(self, weight: Tensor) -> Tensor:
        """Leave it as it is: the gradients of all undivided parameters are summed after backward."""
        return weight

    def own(self, x: Tensor) -> Tensor:
        """See Split."""
        if not self.active:
            return x
        if faults.active("sequence.first_stretch"):
            return x.chunk(self.size, 1)[0]
        return _own(x, self.communicator)

    @torch.compiler.disable
    def whole(self, x: Tensor) -> Tensor:
        """See Split."""
        if not self.active:
            return x
        y: Tensor = _GatherForAll.apply(x, self.communicator)
        return y

    def whole_state(self, state: Any) -> Any:
        """Gather the positions of every (B, t, H) tensor of a unit's state; others are alike on all processes."""
        if isinstance(state, Tensor):
            return self.whole(state) if state.dim() > 2 else state
        if isinstance(state, dict):
            return {name: self.whole_state(value) for name, value in state.items()}
        return tuple(self.whole_state(value) for value in state) if isinstance(state, (tuple, list)) else state


def _as_computed(x: Tensor) -> Tensor:
    """Return what a product makes of its input under autocast, so that half the bytes travel."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if x.dtype == torch.float32 and torch.is_autocast_enabled(kind) else x


def split_sequence(model: nn.Module, units: dict[str, nn.Module], communicator: Communicator) -> set[nn.Parameter]:
    """Divide the stream between the split layers by position, in every unit but the last. The layers are split already.

    Args:
        model: a ChainModel whose layers `split_model` has split.
        units: its whole chain, whatever stage of a pipeline runs here.
        communicator: the tensor-parallel processes.

    Returns:
        The undivided parameters of those units: each process has a part of the sum that is their gradient.

    Raises:
        LayoutError: no ChainModel, a chain of one unit, or an undivided parameter that the last unit uses too.
    """
    if communicator.size == 1:
        return set()
    view = view_of(model, "train.dist.sequence_parallel")
    *before, last = units.values()
    if not before:
        raise LayoutError(f"train.dist.sequence_parallel=true needs units before the last one; {type(model).__name__} has one unit")
    split = SequenceSplit(communicator)
    undivided: set[nn.Parameter] = set()
    for unit in before:
        for module in unit.modules():
            divided = getattr(module, "splits", {})
            if hasattr(module, "split"):
                module.split = split  # type: ignore[assignment]
            if isinstance(module, (Dropout, SinePositionalEmbedding)) or (
                isinstance(module, Embedding) and not isinstance(module, VocabEmbedding)
            ):
                module.stream = split  # type: ignore[assignment]
            undivided.update(p for leaf, p in module._parameters.items() if p is not None and leaf not in divided)
    for name, parameter in last.named_parameters():
        if parameter in undivided:
            raise LayoutError(
                f"train.dist.sequence_parallel=true: {name} of the last unit, {list(units)[-1]}, is shared with a unit that holds a part "
                f"of the positions, and no layer splits it; untie it, or set sequence_parallel=false"
            )
    last.register_forward_pre_hook(lambda _, arguments: (split.whole_state(arguments[0]), *arguments[1:]))
    view.stretches = communicator.size
    view.seams.append(split)
    return undivided
