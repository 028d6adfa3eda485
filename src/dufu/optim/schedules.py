"""Learning-rate schedules: functions of the step, so their whole state is the step."""

from __future__ import annotations

import math
from typing import Any

from dufu.config.registry import register_schedule
from dufu.errors import ConfigError


class Schedule:
    """Sets each group's learning rate from the number of updates done, t = 0, 1, ….

    A subclass gives `inner(base_lr, t)`. The first `warmup_iter` updates go from `warmup_factor` × base_lr to inner(warmup_iter)
    on a line, or hold `warmup_factor` × base_lr. The inner formula is evaluated at t itself, not at t - warmup_iter.

    Args:
        optimizer: whose groups are set; each group's present rate is its base rate.
        max_iter: length of the schedule in updates.
        warmup_factor: share of the base rate at t = 0.
        warmup_iter: updates of warm-up.
        warmup_method: "linear" or "constant".
    """

    def __init__(
        self,
        optimizer: Any,
        max_iter: int,
        warmup_factor: float = 0.0,
        warmup_iter: int = 0,
        warmup_method: str = "linear",
    ) -> None:
        if warmup_method not in ("linear", "constant"):
            raise ConfigError(f'train.scheduler.warmup_method="{warmup_method}"; one of "linear", "constant"')
        self.optimizer, self.max_iter = optimizer, max_iter
        self.warmup_factor, self.warmup_iter, self.warmup_method = warmup_factor, warmup_iter, warmup_method
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]

    def inner(self, base: float, t: int) -> float:
        """Return the rate without warm-up."""
        raise NotImplementedError

    def rate(self, base: float, t: int) -> float:
        """Return the rate of the update after `t` updates."""
        if t >= self.warmup_iter:
            return self.inner(base, t)
        start = base * self.warmup_factor
        if self.warmup_method == "constant":
            return start
        return start + (self.inner(base, self.warmup_iter) - start) * t / self.warmup_iter

    def set(self, t: int) -> None:
        """Set every group's rate for the update after `t` updates."""
        for group, base in zip(self.optimizer.param_groups, self.base_lrs):
            group["lr"] = self.rate(base, t)


@register_schedule("warmup_cosine")
class WarmupCosineLR(Schedule):
    """base · ((1 - alpha) · ½(1 + cos(π t / max_iter)) + alpha).

    Args:
        alpha: share of the base rate that remains at the end.
    """

    def __init__(
        self,
        optimizer: Any,
        max_iter: int,
        warmup_factor: float = 0.0,
        warmup_iter: int = 0,
        alpha: float = 0.0,
        warmup_method: str = "linear",
    ) -> None:
        super().__init__(optimizer, max_iter, warmup_factor, warmup_iter, warmup_method)
        self.alpha = alpha

    def inner(self, base: float, t: int) -> float:
        """See Schedule."""
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(t, self.max_iter) / self.max_iter))
        return base * ((1.0 - self.alpha) * cosine + self.alpha)
