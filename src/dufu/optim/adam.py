"""Adam and AdamW, with and without bias correction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from dufu.config.registry import register_optimizer
from dufu.errors import ConfigError
from dufu.optim.elementwise import ElementwiseOptimizer, moment

# After this many updates 1 - beta^t is exactly 1 for every beta below 1, and one more is no longer counted in float32.
LONG_AGO = 1e30


def check_betas(betas: Sequence[float], owner: str) -> tuple[float, float]:
    """Return two moment decays.

    Raises:
        ConfigError: not two numbers in [0, 1).
    """
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"{owner}: betas={tuple(betas)}; two numbers, each in [0, 1)")
    return float(betas[0]), float(betas[1])


def begin_moments(tensor: Tensor) -> dict[str, Tensor]:
    """Return the state of a tensor before its first update."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
        "exp_avg": moment(tensor),
        "exp_avg_sq": moment(tensor),
    }


def fused_adam(
    weights: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
    correct: bool,
    grad_scale: Tensor | None,
    *,
    lr: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Make Adam's update of weights and states in one fused pass.

    Args:
        weights, grads: at least single precision.
        states: as `begin_moments` gives them.
        group: holds betas and eps.
        correct: whether the moments are divided by 1 - beta^t.
        grad_scale: what the gradients are divided by.
        lr, weight_decay: of the update.
        decoupled: whether the decay shrinks the weights, instead of being added to the gradients.
    """
    steps = [state["step"] for state in states]
    counted = steps
    if not correct:
        # Uncorrected Adam is corrected Adam after endless steps: to the last bit, and in the same fused pass.
        torch._foreach_add_(steps, 1.0)
        counted = [torch.full_like(steps[0], LONG_AGO)] * len(steps)
    beta1, beta2 = group["betas"]
    adam(
        weights, grads, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [], counted, fused=True,
        grad_scale=grad_scale, decoupled_weight_decay=decoupled, amsgrad=False, beta1=beta1, beta2=beta2, lr=lr,
        weight_decay=weight_decay, eps=group["eps"], maximize=False,
    )  # fmt: skip


class _Moments(ElementwiseOptimizer):
    """The common part: first and second moments of the gradients, with the update of Adam."""

    decoupled: bool  # whether weight decay shrinks the weights, instead of being added to the gradients

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: Sequence[float],
        eps: float,
        weight_decay: float,
        do_bias_correction: bool,
    ) -> None:
        betas = check_betas(betas, type(self).__name__)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.do_bias_correction = do_bias_correction

    def begin(self, tensor: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """See ElementwiseOptimizer."""
        return begin_moments(tensor)

    def update(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        """See ElementwiseOptimizer."""
        fused_adam(
            weights, grads, states, group, self.do_bias_correction, self.grad_scale,
            lr=group["lr"], weight_decay=group["weight_decay"], decoupled=self.decoupled,
        )  # fmt: skip


@register_optimizer("adamw")
class AdamW(_Moments):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): p ← p - lr·(m̂ / (√v̂ + eps) + weight_decay·p).

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of the two moment averages m and v.
        eps: added to the root of the second moment.
        weight_decay: share of the weight taken away each step, times lr.
        do_bias_correction: whether m̂ = m / (1 - beta1^t) and v̂ = v / (1 - beta2^t), as in the paper; without it m̂ = m and v̂ = v, as
            in BERT's own optimizer, whose first updates are several times larger.
    """

    decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        do_bias_correction: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, do_bias_correction)


@register_optimizer("adam")
class Adam(_Moments):
    """Adam (Kingma and Ba, 2015); weight decay is added to the gradient, as an L2 penalty.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of the two moment averages.
        eps: added to the root of the second moment.
        weight_decay: weight of the L2 penalty ½·weight_decay·p².
        do_bias_correction: as AdamW's.
    """

    decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        do_bias_correction: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, do_bias_correction)
