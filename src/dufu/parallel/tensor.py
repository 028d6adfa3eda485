"""Tensor parallelism: put this process's part in the place of each layer that says how it may be split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dufu.errors import LayoutError
from dufu.layers.split import Split, SplitRule
from dufu.parallel import faults
from dufu.parallel.collectives import Communicator
from dufu.parallel.region import Region, split_region

Placed = dict[nn.Parameter, tuple[tuple[int, ...], Region]]  # of each part the whole's shape, and the region that it holds


class _Enter(torch.autograd.Function):
    """Identity forward, sum of gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if faults.active("tensor.skip_enter"):
            return grad, None
        grad = grad.contiguous().clone()
        ctx.communicator.sum_(grad)
        return grad, None


class _Leave(torch.autograd.Function):
    """Sum forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        out = x.contiguous().clone()
        if not faults.active("tensor.skip_leave"):
            communicator.sum_(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class TensorSplit(Split):
    """The other parts of a split layer, reached over a communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.size, self.rank = communicator.size, communicator.rank

    # Messages are no part of a compiled graph: it ends before each and goes on after it.
    @torch.compiler.disable
    def enter(self, x: Tensor) -> Tensor:
        """See Split."""
        y: Tensor = _Enter.apply(x, self.communicator)
        return y

    @torch.compiler.disable
    def share(self, weight: Tensor) -> Tensor:
        """See Split."""
        y: Tensor = _Enter.apply(weight, self.communicator)
        return y

    @torch.compiler.disable
    def leave(self, x: Tensor) -> Tensor:
        """See Split."""
        y: Tensor = _Leave.apply(x, self.communicator)
        return y

    @torch.compiler.disable
    def gather(self, x: Tensor) -> Tensor:
        """See Split."""
        x = x.detach().contiguous()
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self.communicator.gather_into(parts.view(-1), x.view(-1))
        return torch.cat(list(parts), -1)

    @torch.compiler.disable
    def sum_(self, x: Tensor) -> Tensor:
        """See Split."""
        self.communicator.sum_(x)
        return x

    @torch.compiler.disable
    def max_(self, x: Tensor) -> Tensor:
        """See Split."""
        self.communicator.max_(x)
        return x


def _within(shape: tuple[int, ...], region: Region, outer: tuple[tuple[int, ...], Region] | None) -> tuple[tuple[int, ...], Region]:
    if outer is None:
        return shape, region
    (block,) = outer[1].blocks
    return outer[0], region.within(block)


def split_model(model: nn.Module, communicator: Communicator, experts: Placed | None = None) -> Placed:
    """Replace each splittable parameter by this process's part, a shared one by one part.

    Args:
        experts: parameters that are already parts, whole rows of a larger one: what `split_experts` returned.

    Returns:
        For each new parameter the whole's shape and the region that lies here.

    Raises:
        LayoutError: a parameter is shared by layers that would split it in different ways, or not at all.
    """
    placed: Placed = {}
    parts: dict[nn.Parameter, tuple[nn.Parameter, SplitRule, str]] = {}
    if communicator.size == 1:
        return placed
    split = TensorSplit(communicator)
    for prefix, module in model.named_modules():
        if not hasattr(module, "split"):
            continue
        module.split = split  # type: ignore[assignment]
        rules: dict[str, SplitRule] = getattr(module, "splits", {})
        for leaf, rule in rules.items():
            whole = getattr(module, leaf, None)
            if whole is None:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            if whole not in parts:
                shape, region = split_region(tuple(whole.shape), rule, communicator.rank, communicator.size)
                part = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device=whole.device), requires_grad=whole.requires_grad)
                placed[part], parts[whole] = _within(tuple(whole.shape), region, (experts or {}).get(whole)), (part, rule, name)
            elif parts[whole][1] != rule:
                raise LayoutError(f"{parts[whole][2]} and {name} are one parameter, but the two layers split it in different ways")
            setattr(module, leaf, parts[whole][0])
    for name, parameter in model.named_parameters():
        if parameter in parts:
            raise LayoutError(f"{parts[parameter][2]} and {name} are one parameter, but only the first layer splits it")
    return placed
