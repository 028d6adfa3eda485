"""LAMB: Adam whose step is as long as each parameter's norm asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dufu.config.registry import register_optimizer
from dufu.optim.adam import begin_moments, check_betas, fused_adam
from dufu.optim.elementwise import wide
from dufu.optim.whole import WholeParameterOptimizer


@register_optimizer("lamb")
class LAMB(WholeParameterOptimizer):
    """Layer-wise adaptive moments (You et al., 2020, algorithm 2), for very large batches.

    With u = m̂ / (√v̂ + eps) + weight_decay·p of a parameter p: p ← p - lr·(‖p‖ / ‖u‖)·u, the norms over the whole parameter; the ratio is
    1 where one of them is 0. One message a step carries all norms. `grad_scale`, if set, divides the gradients inside the pass.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of the two moment averages.
        eps: added to the root of the second moment.
        weight_decay: share of the weight that joins the direction.
        do_bias_correction: whether the moments are divided by 1 - beta^t, as in the paper.
    """

    grad_scale: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        do_bias_correction: bool = True,
    ) -> None:
        betas = check_betas(betas, "LAMB")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})
        self.do_bias_correction = do_bias_correction

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update.

        Args:
            closure: computes the loss again, as PyTorch's optimizers allow.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tensors = self.settle()
        weights = dict(zip(tensors, (wide(p.detach()) for p in tensors)))
        directions: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            if group["params"]:
                chosen = self._directions(group, [weights[p] for p in group["params"]])
                directions.update(zip(group["params"], chosen))
        ratios = self._trust_ratios(tensors, weights, directions)
        for group in self.param_groups:
            for tensor in group["params"]:
                for part in self.parts[tensor]:
                    part.of(weights[tensor]).addcmul_(part.of(directions[tensor]), ratios[part.name], value=group["lr"])
                if weights[tensor].dtype != tensor.dtype:
                    tensor.copy_(weights[tensor])
        return loss

    def _directions(self, group: dict[str, Any], weights: list[Tensor]) -> list[Tensor]:
        """Take the gradients into the moments; return -u for each tensor of a group."""
        for tensor in group["params"]:
            if not self.state[tensor]:
                self.state[tensor] = begin_moments(tensor)
        states, grads = [self.state[p] for p in group["params"]], [self.gradient(p) for p in group["params"]]
        # Adam with rate 1 moves zeros to minus its direction, in one fused pass.
        found = [torch.zeros_like(weight) for weight in weights]
        fused_adam(found, grads, states, group, self.do_bias_correction, self.grad_scale, lr=1.0, weight_decay=0.0, decoupled=True)
        if group["weight_decay"]:
            torch._foreach_sub_(found, weights, alpha=group["weight_decay"])
        return found

    def _trust_ratios(
        self, tensors: list[Tensor], weights: dict[Tensor, Tensor], directions: dict[Tensor, Tensor]
    ) -> dict[str, Tensor]:
        """Return each parameter's ‖p‖ / ‖u‖, equal on every process."""
        place = {name: i for i, name in enumerate(self.shapes)}
        held = [(place[part.name], part, tensor) for tensor in tensors for part in self.parts[tensor] if part.counted]
        squares = torch.zeros(2, len(place), dtype=torch.float64, device=tensors[0].device)
        if held:
            norms = [
                torch.stack(torch._foreach_norm([part.of(values[tensor]) for _, part, tensor in held]))
                for values in (weights, directions)
            ]
            where = torch.tensor([i for i, _, _ in held], device=squares.device)
            squares.index_add_(1, where, torch.stack(norms).double().square())
        self.sum_(squares)
        weight, direction = squares.sqrt()
        ratio = torch.where((weight > 0) & (direction > 0), weight / direction, 1.0).float()
        return dict(zip(self.shapes, ratio.unbind()))
