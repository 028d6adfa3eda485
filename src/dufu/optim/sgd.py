"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.sgd import sgd

from dufu.config.registry import register_optimizer
from dufu.errors import ConfigError
from dufu.optim.elementwise import ElementwiseOptimizer, moment


@register_optimizer("sgd")
class SGD(ElementwiseOptimizer):
    """Gradient descent with momentum (Sutskever et al., 2013): b ← momentum·b + g; p ← p - lr·b.

    Args:
        params: parameters or groups.
        lr: learning rate.
        momentum: share of the last direction kept.
        weight_decay: weight of the L2 penalty ½·weight_decay·p², whose gradient is added to g.
        nesterov: p ← p - lr·(g + momentum·b).

    Raises:
        ConfigError: nesterov without momentum.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if nesterov and momentum <= 0.0:
            raise ConfigError(f"SGD: nesterov=True needs momentum above 0, not {momentum}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov})

    def begin(self, tensor: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """See ElementwiseOptimizer."""
        return {"momentum_buffer": moment(tensor)} if group["momentum"] else {}

    def update(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        """See ElementwiseOptimizer."""
        sgd(
            weights, grads, [state.get("momentum_buffer") for state in states], fused=True, grad_scale=self.grad_scale,
            weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"], dampening=0.0, nesterov=group["nesterov"],
            maximize=False,
        )  # fmt: skip
