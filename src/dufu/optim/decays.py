"""Learning-rate schedules that hold the base rate when the warm-up ends and fall from there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dufu.config.registry import register_schedule
from dufu.errors import ConfigError, nearest
from dufu.optim.schedules import Schedule

# How much of a fall is still to come, by the share x of its length that is over.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    "sqrt": lambda x: 1.0 - math.sqrt(x),
}


class _Decay(Schedule):
    """A schedule whose fall begins at the end of the warm-up and ends at max_iter."""

    def progress(self, t: int) -> float:
        """Return the share of the fall that is over, in [0, 1]."""
        if t <= self.warmup_iter:
            return 0.0
        return min(1.0, (t - self.warmup_iter) / max(1, self.max_iter - self.warmup_iter))


@register_schedule("constant")
class ConstantLR(Schedule):
    """The base rate, after a warm-up if there is one.

    Args:
        optimizer, max_iter, warmup_factor, warmup_iter, warmup_method: see Schedule.
    """

    def inner(self, base: float, t: int) -> float:
        """See Schedule."""
        return base


@register_schedule("polynomial")
class PolynomialLR(_Decay):
    """(base - end) · (1 - x)^power + end, where x goes from 0 at the end of the warm-up to 1 at max_iter.

    Args:
        optimizer, max_iter, warmup_factor, warmup_iter, warmup_method: see Schedule.
        end_learning_rate: the rate at the end.
        power: of the fall.
    """

    def __init__(
        self,
        optimizer: Any,
        max_iter: int,
        warmup_factor: float = 0.0,
        warmup_iter: int = 0,
        end_learning_rate: float = 0.0,
        power: float = 1.0,
        warmup_method: str = "linear",
    ) -> None:
        super().__init__(optimizer, max_iter, warmup_factor, warmup_iter, warmup_method)
        self.end_learning_rate, self.power = end_learning_rate, power

    def inner(self, base: float, t: int) -> float:
        """See Schedule."""
        return (base - self.end_learning_rate) * math.pow(1.0 - self.progress(t), self.power) + self.end_learning_rate


@register_schedule("linear")
class LinearLR(_Decay):
    """base · (end_factor + (1 - end_factor) · (1 - x)), where x goes from 0 at the end of the warm-up to 1 at max_iter.

    Args:
        optimizer, max_iter, warmup_factor, warmup_iter, warmup_method: see Schedule.
        end_factor: share of the base rate that remains at the end.
    """

    def __init__(
        self,
        optimizer: Any,
        max_iter: int,
        warmup_factor: float = 0.0,
        warmup_iter: int = 0,
        end_factor: float = 0.0,
        warmup_method: str = "linear",
    ) -> None:
        super().__init__(optimizer, max_iter, warmup_factor, warmup_iter, warmup_method)
        self.end_factor = end_factor

    def inner(self, base: float, t: int) -> float:
        """See Schedule."""
        return base * (self.end_factor + (1.0 - self.end_factor) * (1.0 - self.progress(t)))


@register_schedule("inverse_sqrt")
class InverseSqrtLR(Schedule):
    """base · √(timescale / (t - warmup_iter + timescale)), as the Transformer's schedule (Vaswani et al., 2017) after its warm-up.

    Args:
        optimizer, max_iter, warmup_factor, warmup_iter, warmup_method: see Schedule.
        timescale: updates after which the rate has fallen to 1/√2; None = warmup_iter, then the rate is base · √(warmup_iter / t).

    Raises:
        ConfigError: neither a timescale nor a warm-up.
    """

    def __init__(
        self,
        optimizer: Any,
        max_iter: int,
        warmup_factor: float = 0.0,
        warmup_iter: int = 0,
        timescale: int | None = None,
        warmup_method: str = "linear",
    ) -> None:
        super().__init__(optimizer, max_iter, warmup_factor, warmup_iter, warmup_method)
        self.timescale = warmup_iter if timescale is None else timescale
        if self.timescale < 1:
            raise ConfigError(
                f"InverseSqrtLR: timescale={timescale} and warmup_iter={warmup_iter}; one of them must be at least 1, "
                f"such as timescale=10000"
            )

    def inner(self, base: float, t: int) -> float:
        """See Schedule."""
        return base * math.sqrt(self.timescale / (max(0, t - self.warmup_iter) + self.timescale))


@register_schedule("wsd")
class WarmupStableDecayLR(Schedule):
    """The base rate until the last `decay_iter` updates, then a fall to `end_factor` × base (Hu et al., 2024).

    Args:
        optimizer, max_iter, warmup_factor, warmup_iter, warmup_method: see Schedule.
        decay_iter: updates of the fall; None takes decay_ratio.
        decay_ratio: share of max_iter taken by the fall.
        decay_shape: "linear", "cosine", or "sqrt" (1 - √x; Hägele et al., 2024).
        end_factor: share of the base rate that remains at the end.

    Raises:
        ConfigError: an unknown shape, or warm-up and fall longer than the schedule.
    """

    def __init__(
        self,
        optimizer: Any,
        max_iter: int,
        warmup_factor: float = 0.0,
        warmup_iter: int = 0,
        decay_iter: int | None = None,
        decay_ratio: float = 0.1,
        decay_shape: str = "linear",
        end_factor: float = 0.0,
        warmup_method: str = "linear",
    ) -> None:
        super().__init__(optimizer, max_iter, warmup_factor, warmup_iter, warmup_method)
        if decay_shape not in SHAPES:
            raise ConfigError(f'WarmupStableDecayLR: decay_shape="{decay_shape}"{nearest(decay_shape, SHAPES)}')
        self.decay_iter = math.ceil(max_iter * decay_ratio) if decay_iter is None else decay_iter
        if self.decay_iter < 0 or warmup_iter + self.decay_iter > max_iter:
            raise ConfigError(
                f"WarmupStableDecayLR: {warmup_iter} updates of warm-up and {self.decay_iter} of decay do not fit into max_iter={max_iter}"
            )
        self.decay_shape, self.end_factor = decay_shape, end_factor

    def inner(self, base: float, t: int) -> float:
        """See Schedule."""
        begun = t - (self.max_iter - self.decay_iter)
        if begun <= 0:
            return base
        left = SHAPES[self.decay_shape](min(1.0, begun / max(1, self.decay_iter)))
        return base * (self.end_factor + (1.0 - self.end_factor) * left)


@register_schedule("one_cycle")
class OneCycleLR(Schedule):
    """One rise to the base rate and one fall to nearly nothing (Smith and Topin, 2018), with the values of PyTorch's OneCycleLR.

    The rise goes from base / div_factor to base, the fall on to base / (div_factor · final_div_factor) at update max_iter - 1.

    Args:
        optimizer, max_iter: see Schedule; the group's rate is the largest one.
        warmup_iter: updates of the rise; 0 takes pct_start.
        pct_start: share of max_iter taken by the rise; None = 0.3.
        anneal_strategy: "cos" or "linear", the shape of both.
        div_factor, final_div_factor: how much smaller the first and the last rate are.

    Raises:
        ConfigError: warmup_iter and pct_start both given, or an unknown shape.
    """

    def __init__(
        self,
        optimizer: Any,
        max_iter: int,
        warmup_iter: int = 0,
        pct_start: float | None = None,
        anneal_strategy: str = "cos",
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
    ) -> None:
        shapes = {"cos": SHAPES["cosine"], "linear": SHAPES["linear"]}
        if anneal_strategy not in shapes:
            raise ConfigError(f'OneCycleLR: anneal_strategy="{anneal_strategy}"{nearest(anneal_strategy, shapes)}')
        if warmup_iter and pct_start is not None:
            raise ConfigError(
                f"OneCycleLR: the rise is given by warmup_iter={warmup_iter} (of train.warmup_ratio, unless set here) and by "
                f"pct_start={pct_start}; give one of them"
            )
        super().__init__(optimizer, max_iter, 1.0 / div_factor, warmup_iter)
        self.peak = float(warmup_iter) if warmup_iter else (0.3 if pct_start is None else pct_start) * max_iter - 1.0
        self.shape, self.div_factor, self.final_div_factor = shapes[anneal_strategy], div_factor, final_div_factor

    def rate(self, base: float, t: int) -> float:
        """See Schedule."""
        first, last, end = base / self.div_factor, base / self.div_factor / self.final_div_factor, self.max_iter - 1
        if t < self.peak:
            return base + (first - base) * self.shape(t / self.peak)
        return last + (base - last) * self.shape(min(1.0, (t - self.peak) / max(1e-9, end - self.peak)))
