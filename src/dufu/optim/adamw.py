"""AdamW, with and without bias correction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dufu.config.registry import register_optimizer


@register_optimizer("adamw")
class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as one fused pass.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of the two moment averages.
        eps: added to the root of the second moment.
        weight_decay: share of the weight taken away each step, times lr.
        do_bias_correction: whether the moments are divided by 1 - beta^t, as in the paper; BERT's original optimizer did not.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        do_bias_correction: bool = True,
    ) -> None:
        super().__init__(params, lr, tuple(betas), eps, weight_decay, fused=True)  # type: ignore[arg-type]
        self.do_bias_correction = do_bias_correction
