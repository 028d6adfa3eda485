"""Optimizers that treat every element by itself, so that any stretch of any parameter may be handed to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor itself in single or double precision, a float32 copy of one in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def moment(tensor: Tensor) -> Tensor:
    """Return zeros of a tensor's shape, float32 also where the tensor is half: small gradients would vanish in half moments."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


class ElementwiseOptimizer(torch.optim.Optimizer):
    """Base of optimizers that update all elements of a group in one fused pass.

    A subclass gives `begin` and `update`. Half-precision tensors are widened for the pass and rounded once at its end; their state is
    float32. `grad_scale`, if set, divides the gradients inside the pass (the training step clips and unscales through it).

    Args:
        params: parameters or groups.
        defaults: the settings of groups that do not give their own.
    """

    elementwise = True  # any layout may cut its parameters anywhere
    grad_scale: Tensor | None = None

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, "fused": True})

    def begin(self, tensor: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a tensor before its first update."""
        raise NotImplementedError

    def update(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        """Change weights and states in place, dividing the gradients by `grad_scale`."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update; tensors without a gradient stay as they are.

        Args:
            closure: computes the loss again, as PyTorch's optimizers allow.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            tensors = [p for p in group["params"] if p.grad is not None]
            if not tensors:
                continue
            for tensor in tensors:
                if not self.state[tensor]:
                    self.state[tensor] = self.begin(tensor, group)
            weights = [wide(p.detach()) for p in tensors]
            self.update(group, weights, [wide(p.grad) for p in tensors], [self.state[p] for p in tensors])
            for tensor, weight in zip(tensors, weights):
                if weight.dtype != tensor.dtype:
                    tensor.copy_(weight)
        return loss
