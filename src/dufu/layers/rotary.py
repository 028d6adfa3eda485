"""Rotary positions: queries and keys turned by an angle that grows with the position."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from dufu.errors import ConfigError, NotBuiltError, nearest

Rotation = tuple[Tensor, Tensor]  # cosines and sines, (B or 1, 1, T, rotated features / 2), float32


class Scaling(Protocol):
    """A change of the frequencies for contexts longer than the model was trained on."""

    @property
    def magnitude(self) -> float:
        """Return the factor on rotated queries and keys."""

    def change(self, frequencies: Sequence[float], base: float) -> list[float]:
        """Return the new frequencies, those of the pairs in order (radians a token)."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Slow frequencies lowered for contexts longer than the model was trained on, as Llama 3.1 does it.

    Args:
        factor: by how much the slowest frequencies are divided.
        low_freq_factor, high_freq_factor: wave lengths above original_length / low are divided by `factor`, those below
            original_length / high are kept, those between are mixed.
        original_length: tokens of a context in training.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    magnitude: ClassVar[float] = 1.0

    def change(self, frequencies: Sequence[float], base: float) -> list[float]:
        """See Scaling."""
        return [self(frequency) for frequency in frequencies]

    def __call__(self, frequency: float) -> float:
        """Return the new frequency (radians a token)."""
        turns = self.original_length * frequency / (2.0 * math.pi)  # full turns within the original context
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = min(1.0, max(0.0, share))
        return frequency * (share + (1.0 - share) / self.factor)


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by `factor` (Chen et al., "Extending context window ... via positional interpolation", 2023)."""

    factor: float
    magnitude: ClassVar[float] = 1.0

    def change(self, frequencies: Sequence[float], base: float) -> list[float]:
        """See Scaling."""
        return [frequency / self.factor for frequency in frequencies]


@dataclass(frozen=True)
class YarnScaling:
    """Slow frequencies divided by `factor`, fast ones kept, those between mixed by a ramp over the pairs (Peng et al., "YaRN", 2023).

    Args:
        factor: by how much the slowest frequencies are divided.
        original_length: tokens of a context in training.
        beta_fast, beta_slow: a pair that turns more often than beta_fast within the original context is kept, one that turns less often
            than beta_slow is divided.
        attention_factor: factor on rotated queries and keys; None = 0.1 · ln(factor) + 1.
        truncate: whether the ramp begins and ends at whole pairs.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """See Scaling."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0

    def change(self, frequencies: Sequence[float], base: float) -> list[float]:
        """See Scaling."""
        pairs = len(frequencies)

        def pair_that_turns(turns: float) -> float:
            return pairs * math.log(self.original_length / (turns * 2.0 * math.pi)) / math.log(base)

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        width = last - first or 0.001
        shares = [min(1.0, max(0.0, (pair - first) / width)) for pair in range(pairs)]
        return [frequency * (1.0 - share + share / self.factor) for frequency, share in zip(frequencies, shares)]


SCALINGS: dict[str, type[Any]] = {"llama3": Llama3Scaling, "linear": LinearScaling, "yarn": YarnScaling}


def build_scaling(settings: Mapping[str, Any] | None) -> Scaling | None:
    """Return the scaling that a model's `rotary_scaling` describes: its "kind" (llama3 where none is given) and that kind's arguments.

    Raises:
        ConfigError: an unknown kind or key. NotBuiltError: "dynamic" scaling.
    """
    if settings is None:
        return None
    given = dict(settings)
    kind = given.pop("kind", "llama3")
    if kind == "dynamic":
        raise NotBuiltError(
            'rotary_scaling kind="dynamic" lets the length of a batch change its frequencies, so that cached keys are wrong, and is not '
            'built; use "yarn" or "linear"'
        )
    if kind not in SCALINGS:
        raise ConfigError(f'rotary_scaling kind="{kind}"{nearest(str(kind), list(SCALINGS))}; one of {", ".join(SCALINGS)}')
    try:
        found: Scaling = SCALINGS[kind](**given)
    except TypeError:
        known = ", ".join(f.name for f in fields(SCALINGS[kind]))
        raise ConfigError(f"model.cfg.rotary_scaling={dict(settings)}: for kind {kind} the keys are {known}") from None
    return found


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al., "RoFormer", 2021): feature pair i turns by position · base^(-2i / rotary_size).

    Feature i is paired with feature i + rotary_size / 2. There is no parameter and no table: angles are computed in float64, so that
    no cast of the model can round them, and passed to every layer.

    Args:
        rotary_size: features of a head that are rotated, from the first; even.
        base: the slowest wave length is about 2π · base tokens.
        scaling: changes the frequencies; None leaves them.

    Shapes: positions (B, T) or (T,) → a Rotation for Attention.

    Raises:
        ConfigError: rotary_size is odd.
    """

    def __init__(self, rotary_size: int, base: float = 10000.0, scaling: Scaling | None = None) -> None:
        super().__init__()
        if rotary_size % 2:
            raise ConfigError(f"rotary_size={rotary_size}: an even number, such as {rotary_size + 1}")
        self.rotary_size, self.base = rotary_size, base
        frequencies = [base ** (-2.0 * i / rotary_size) for i in range(rotary_size // 2)]
        self.frequencies = scaling.change(frequencies, base) if scaling else frequencies
        self.magnitude = scaling.magnitude if scaling else 1.0

    def forward(self, positions: Tensor) -> Rotation:
        """Return the cosines and sines of the tokens' angles."""
        if positions.dim() == 1:
            positions = positions.unsqueeze(0)
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=positions.device)
        angles = positions.double()[:, None, :, None] * frequencies
        return (angles.cos() * self.magnitude).float(), (angles.sin() * self.magnitude).float()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the first features of each head: (B, H, T, D) → the same, computed in float32."""
    cos, sin = rotation
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), -1)
