"""Rotary positions: queries and keys turned by an angle that grows with the position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dufu.errors import ConfigError

Rotation = tuple[Tensor, Tensor]  # cosines and sines, (B or 1, 1, T, rotated features / 2), float32


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

    def __call__(self, frequency: float) -> float:
        """Return the new frequency (radians a token)."""
        turns = self.original_length * frequency / (2.0 * math.pi)  # full turns within the original context
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = min(1.0, max(0.0, share))
        return frequency * (share + (1.0 - share) / self.factor)


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

    def __init__(self, rotary_size: int, base: float = 10000.0, scaling: Llama3Scaling | None = None) -> None:
        super().__init__()
        if rotary_size % 2:
            raise ConfigError(f"rotary_size={rotary_size}: an even number, such as {rotary_size + 1}")
        self.rotary_size, self.base = rotary_size, base
        frequencies = [base ** (-2.0 * i / rotary_size) for i in range(rotary_size // 2)]
        self.frequencies = [scaling(f) for f in frequencies] if scaling else frequencies

    def forward(self, positions: Tensor) -> Rotation:
        """Return the cosines and sines of the tokens' angles."""
        if positions.dim() == 1:
            positions = positions.unsqueeze(0)
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=positions.device)
        angles = positions.double()[:, None, :, None] * frequencies
        return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the first features of each head: (B, H, T, D) → the same, computed in float32."""
    cos, sin = rotation
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), -1)
