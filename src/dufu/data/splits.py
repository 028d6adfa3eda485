"""Training, validation and test documents: disjoint by construction, because each document lies in exactly one range."""

from __future__ import annotations

from collections.abc import Sequence

from dufu.errors import ConfigError


def split_boundaries(size: int, shares: Sequence[float]) -> list[int]:
    """Return the boundaries [0, a, b, size] of the three ranges that `shares` describes.

    Shares are normalised; each part is rounded, and the total rounding error shifts all boundaries but the first, as Megatron does.

    Raises:
        ConfigError: a share is negative, or all are zero.
    """
    shares = [*shares, 0.0, 0.0][:3]
    if min(shares) < 0 or sum(shares) <= 0:
        raise ConfigError(f"dataloader.split={list(shares)}: shares are not negative and not all zero")
    boundaries = [0]
    for share in shares:
        boundaries.append(boundaries[-1] + round(share / sum(shares) * size))
    error = boundaries[-1] - size
    return [0] + [min(size, max(0, b - error)) for b in boundaries[1:]]
