"""Mixed precision: what the model computes with, what the optimizer updates, and the loss scale of fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dufu.errors import ConfigError, NonFiniteError


@dataclass(frozen=True)
class Precision:
    """The effect of `train.amp`.

    Args:
        level: O0 fp32; O1 autocast over fp32 weights; O2 half weights with fp32 master weights and states; O3 pure half.
        dtype: the half type.
    """

    level: str
    dtype: torch.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the type of the model's weights."""
        return self.dtype if self.level in ("O2", "O3") else torch.float32

    @property
    def master(self) -> bool:
        """Say whether the optimizer updates float32 copies."""
        return self.level == "O2"

    @property
    def scaled(self) -> bool:
        """Say whether gradients would underflow without a loss scale."""
        return self.level != "O0" and self.dtype == torch.float16

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return torch.autocast(device.type, self.dtype) if self.level == "O1" else nullcontext()


def precision_from_config(amp: Any, device: torch.device) -> Precision:
    """Return the precision that `train.amp` describes.

    Raises:
        ConfigError: a level or type is given while amp is disabled, or contradicts it.
    """
    if not amp.enabled:
        if amp.level not in (None, "O0") or amp.dtype is not None:
            raise ConfigError(f"train.amp.level={amp.level}, dtype={amp.dtype}, but train.amp.enabled=false; set enabled=true")
        return Precision("O0", torch.bfloat16)
    half = device.type != "cuda" or torch.cuda.is_bf16_supported()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp.dtype, torch.bfloat16 if half else torch.float16)
    return Precision(amp.level or "O1", dtype)


class LossScaler:
    """Dynamic loss scale (Micikevicius et al., 2018): halved when a gradient overflows, doubled after many steps without.

    The decision is taken on the global gradient norm, so every process takes the same one.
    """

    def __init__(self, amp: Any) -> None:
        for name in ("init_scale", "min_scale", "growth_interval", "max_skips_at_floor"):
            if not getattr(amp, name) > 0:
                raise ConfigError(f"train.amp.{name}={getattr(amp, name)}: above 0")
        self.scale: float = amp.init_scale
        self.growth_interval: int = amp.growth_interval
        self.min_scale: float = amp.min_scale
        self.max_skips: int = amp.max_skips_at_floor
        self.good_steps = 0
        self.skips_at_floor = 0

    def update(self, finite: bool) -> None:
        """Take note of a step.

        Raises:
            NonFiniteError: too many steps in a row overflowed at the smallest scale.
        """
        if finite:
            self.skips_at_floor = 0
            self.good_steps += 1
            if self.good_steps >= self.growth_interval:
                self.scale, self.good_steps = self.scale * 2.0, 0
            return
        self.good_steps = 0
        if self.scale <= self.min_scale:
            self.skips_at_floor += 1
            if self.skips_at_floor >= self.max_skips:
                raise NonFiniteError(
                    f"gradients overflowed in {self.skips_at_floor} steps in a row at the smallest loss scale {self.scale}; "
                    f"the weights are unchanged since then; try train.amp.dtype=bf16 or a smaller learning rate"
                )
        self.scale = max(self.min_scale, self.scale / 2.0)

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skips_at_floor": self.skips_at_floor}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over a saved state."""
        self.scale = float(state["scale"])
        self.good_steps, self.skips_at_floor = int(state["good_steps"]), int(state["skips_at_floor"])
