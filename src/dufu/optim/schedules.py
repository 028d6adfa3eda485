"""Learning-rate schedules: functions of the step, so their whole state is the step. The base, and LiBai's six."""

from __future__ import annotations

import bisect
import math
import warnings
from collections.abc import Sequence
from typing import Any

from dufu.config.registry import register_schedule
from dufu.errors import ConfigError, nearest

METHODS = ("linear", "constant")


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

    Raises:
        ConfigError: a length that cannot be, or an unknown method.
    """

    warns_without_warmup = False

    def __init__(
        self,
        optimizer: Any,
        max_iter: int,
        warmup_factor: float = 0.0,
        warmup_iter: int = 0,
        warmup_method: str = "linear",
    ) -> None:
        name = type(self).__name__
        if warmup_method not in METHODS:
            raise ConfigError(f'{name}: warmup_method="{warmup_method}"{nearest(warmup_method, METHODS)}')
        if max_iter < 1:
            raise ConfigError(f"{name}: max_iter={max_iter}; at least 1")
        if warmup_iter < 0:
            raise ConfigError(f"{name}: warmup_iter={warmup_iter}; 0 or more")
        if warmup_iter == 0 and self.warns_without_warmup:
            warnings.warn(
                f"{name}: warmup_iter is 0, so there is no warm-up and warmup_factor and warmup_method change nothing", stacklevel=3
            )
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


class _LiBaiSchedule(Schedule):
    """LiBai's schedules say that they do without a warm-up."""

    warns_without_warmup = True


@register_schedule("warmup_cosine")
class WarmupCosineLR(_LiBaiSchedule):
    """base · ((1 - alpha) · ½(1 + cos(π t / max_iter)) + alpha).

    Args:
        optimizer, max_iter, warmup_factor, warmup_iter, warmup_method: see Schedule.
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
        return base * ((1.0 - self.alpha) * half_cosine(t, self.max_iter) + self.alpha)


@register_schedule("warmup_cosine_annealing")
class WarmupCosineAnnealingLR(_LiBaiSchedule):
    """eta_min + (base - eta_min) · ½(1 + cos(π t / max_iter)).

    Args:
        optimizer, max_iter, warmup_factor, warmup_iter, warmup_method: see Schedule.
        eta_min: the rate at the end.
    """

    def __init__(
        self,
        optimizer: Any,
        max_iter: int,
        warmup_factor: float = 0.0,
        warmup_iter: int = 0,
        eta_min: float = 0.0,
        warmup_method: str = "linear",
    ) -> None:
        super().__init__(optimizer, max_iter, warmup_factor, warmup_iter, warmup_method)
        self.eta_min = eta_min

    def inner(self, base: float, t: int) -> float:
        """See Schedule."""
        return self.eta_min + (base - self.eta_min) * half_cosine(t, self.max_iter)


@register_schedule("warmup_step")
class WarmupStepLR(_LiBaiSchedule):
    """base · gamma^⌊t / step_size⌋.

    Args:
        optimizer, max_iter, warmup_factor, warmup_iter, warmup_method: see Schedule.
        step_size: updates between two falls.
        gamma: what the rate is multiplied by.
    """

    def __init__(
        self,
        optimizer: Any,
        max_iter: int,
        warmup_factor: float = 0.0,
        warmup_iter: int = 0,
        *,
        step_size: int,
        gamma: float = 0.1,
        warmup_method: str = "linear",
    ) -> None:
        if step_size < 1:
            raise ConfigError(f"WarmupStepLR: step_size={step_size}; at least 1")
        super().__init__(optimizer, max_iter, warmup_factor, warmup_iter, warmup_method)
        self.step_size, self.gamma = step_size, gamma

    def inner(self, base: float, t: int) -> float:
        """See Schedule."""
        return base * self.gamma ** (t // self.step_size)


@register_schedule("warmup_multi_step")
class WarmupMultiStepLR(_LiBaiSchedule):
    """base · gamma^(number of milestones ≤ t).

    Args:
        optimizer, max_iter, warmup_factor, warmup_iter, warmup_method: see Schedule.
        milestones: increasing; each a number of updates, or, below 1, a share of max_iter.
        gamma: what the rate is multiplied by at each.
    """

    def __init__(
        self,
        optimizer: Any,
        max_iter: int,
        warmup_factor: float = 0.0,
        warmup_iter: int = 0,
        *,
        milestones: Sequence[float],
        gamma: float = 0.1,
        warmup_method: str = "linear",
    ) -> None:
        super().__init__(optimizer, max_iter, warmup_factor, warmup_iter, warmup_method)
        self.milestones = [m * max_iter if m < 1 else m for m in milestones]
        if self.milestones != sorted(set(self.milestones)) or any(m < 0 for m in self.milestones):
            raise ConfigError(
                f"WarmupMultiStepLR: milestones={list(milestones)} (updates {self.milestones}); from 0 on, each later than the one before"
            )
        self.gamma = gamma

    def inner(self, base: float, t: int) -> float:
        """See Schedule."""
        return base * self.gamma ** bisect.bisect_right(self.milestones, t)


@register_schedule("warmup_exponential")
class WarmupExponentialLR(_LiBaiSchedule):
    """base · gamma^t.

    Args:
        optimizer, max_iter, warmup_factor, warmup_iter, warmup_method: see Schedule.
        gamma: what the rate is multiplied by at each update.
    """

    def __init__(
        self,
        optimizer: Any,
        max_iter: int,
        warmup_factor: float = 0.0,
        warmup_iter: int = 0,
        *,
        gamma: float,
        warmup_method: str = "linear",
    ) -> None:
        super().__init__(optimizer, max_iter, warmup_factor, warmup_iter, warmup_method)
        self.gamma = gamma

    def inner(self, base: float, t: int) -> float:
        """See Schedule."""
        return base * self.gamma**t


@register_schedule("warmup_polynomial")
class WarmupPolynomialLR(_LiBaiSchedule):
    """(base - end) · (1 - min(t, N) / N)^power + end, with N = max_iter.

    Args:
        optimizer, max_iter, warmup_factor, warmup_iter, warmup_method: see Schedule.
        end_learning_rate: the rate at the end.
        power: of the fall.
        cycle: whether the rate rises again after max_iter: N is then the next multiple of max_iter.
    """

    def __init__(
        self,
        optimizer: Any,
        max_iter: int,
        warmup_factor: float = 0.0,
        warmup_iter: int = 0,
        end_learning_rate: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        warmup_method: str = "linear",
    ) -> None:
        super().__init__(optimizer, max_iter, warmup_factor, warmup_iter, warmup_method)
        self.end_learning_rate, self.power, self.cycle = end_learning_rate, power, cycle

    def inner(self, base: float, t: int) -> float:
        """See Schedule."""
        length = self.max_iter * max(1, math.ceil(t / self.max_iter)) if self.cycle else self.max_iter
        left = 1.0 - min(t, length) / length
        return (base - self.end_learning_rate) * math.pow(left, self.power) + self.end_learning_rate


def half_cosine(t: int, length: int) -> float:
    """Return ½(1 + cos(π t / length)), which falls from 1 to 0 and stays there."""
    return 0.5 * (1.0 + math.cos(math.pi * min(t, length) / length))
