"""Counter-based randomness: a value is a function of what it is for, never of rank, order or device.

Weights are a function of (seed, parameter name, row, column); dropout masks of (seed, step, sample, position, place, feature).
The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): stream `key`'s i-th
word is `mix(key + i * GOLDEN)`. Integers wrap modulo 2^64, so every device gives the same bits. One word makes two normal
deviates or four 16-bit dropout decisions.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)
_GOLDEN = _signed(0x9E3779B97F4A7C15)
# As a tensor, so that a compiler cannot fold its multiples into constants, which would leave 64 bits instead of wrapping.
_GOLDEN_TENSOR = torch.tensor(_GOLDEN, dtype=torch.int64, device="cpu")
_LANES = 4  # 16-bit decisions in one 64-bit word


def stable_hash(*parts: object) -> int:
    """Return a signed 64-bit hash of the parts that is the same in every process and on every machine."""
    text = "\x1f".join(map(str, parts)).encode()
    return _signed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


def mix_(x: Tensor) -> Tensor:
    """Scramble int64 words in place (SplitMix64's finaliser).

    The first two shifts are arithmetic where the original's are logical: that merges only the pairs (x, ~x), which two counters
    of one stream hit with probability 2^-63, and saves two passes. The last one is logical, so that each bit is unbiased.
    """
    t = x >> 30
    x ^= t
    x *= _MULTIPLY_1
    t = x >> 27
    x ^= t
    x *= _MULTIPLY_2
    t = x >> 32
    t &= 0xFFFFFFFF
    x ^= t
    return x


def counters(first: int, count: int, device: torch.device) -> Tensor:
    """Return what the numbers `first … first+count-1` add to a stream's key: (count,) int64."""
    return torch.arange(first, first + count, device=device) * _GOLDEN_TENSOR


def words(keys: Tensor, first: int, count: int) -> Tensor:
    """Return words `first … first+count-1` of each stream: keys (…) → (…, count) int64."""
    return mix_(keys.unsqueeze(-1) + counters(first, count, keys.device))


def token_keys(seed: int, step: int | Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Return the dropout key of every token.

    Args:
        seed: the run's seed.
        step: number of the step, counted from 0.
        samples: (B,) global sample numbers.
        positions: (B, T) position of each token in its sample, before any split or padding.

    Returns:
        (B, T) int64.
    """
    base = (
        torch.as_tensor(stable_hash("dropout", seed), device=samples.device)
        + torch.as_tensor(step, device=samples.device) * _GOLDEN
    )
    per_sample = mix_(samples.long() * _GOLDEN + mix_(base.clone()))
    return mix_(per_sample.unsqueeze(-1) + positions.long() * _GOLDEN)


def derive(keys: Tensor, salt: int | Tensor) -> Tensor:
    """Return new keys for another place, head or purpose."""
    return mix_(keys + salt)


def threshold(p: float) -> int:
    """Return the number of 65536ths nearest to the probability `p`: decisions are made on 16 bits."""
    return round(p * 65536)


def keep_mask(keys: Tensor, size: int, p: float, first: int = 0) -> Tensor:
    """Return which features survive dropout.

    Args:
        keys: (…) int64, one per token (or token and head), already derived for the place.
        size: number of features on this process.
        p: probability of dropping, rounded to a 65536th.
        first: number of the first feature in the whole tensor, when this process holds a slice.

    Returns:
        (…, size) bool, True where the feature is kept.
    """
    start = first // _LANES
    stop = -(-(first + size) // _LANES)
    lanes = words(keys, start, stop - start).view(torch.int16)
    if first % _LANES or lanes.shape[-1] != size:
        lanes = lanes[..., first - start * _LANES : first - start * _LANES + size]
    return lanes >= threshold(p) - 32768


def keep_scale(p: float) -> float:
    """Return the factor that keeps the expectation: 1 / (1 - p), with the p that `keep_mask` really uses."""
    return 65536.0 / (65536 - threshold(p))


def uniform(keys: Tensor) -> Tensor:
    """Return one float64 in (0, 1) for each key."""
    bits = (mix_(keys.clone()) >> 11) & ((1 << 53) - 1)
    return (bits.double() + 0.5) * 2.0**-53


def normal_block(seed: int, name: str, row: int, rows: int, col: int, cols: int, device: torch.device | None = None) -> Tensor:
    """Return a rectangle of the infinite matrix of standard normal deviates that belongs to (seed, name).

    Two words of 32 bits make two deviates (Box and Muller, 1958); columns 2i and 2i+1 share a word.

    Returns:
        (rows, cols) float32.
    """
    start, stop = col // 2, -(-(col + cols) // 2)
    rows_index = torch.arange(row, row + rows, device=device)
    keys = mix_(rows_index * _GOLDEN + stable_hash("weight", seed, name))
    bits = words(keys, start, stop - start)
    low = (bits & 0xFFFFFFFF).double().add_(0.5).mul_(2.0**-32)
    high = ((bits >> 32) & 0xFFFFFFFF).double().add_(0.5).mul_(2.0**-32)
    radius = low.log_().mul_(-2.0).sqrt_()
    angle = high.mul_(2.0 * math.pi)
    pair = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).reshape(rows, -1).float()
    return pair[:, col - 2 * start : col - 2 * start + cols]
