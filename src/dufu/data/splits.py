"""Training, validation and test documents: disjoint by construction, because each document lies in exactly one range."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dufu.errors import ConfigError


def split_boundaries(size: int, shares: Sequence[float]) -> list[int]:
    """Return the boundaries [0, a, b, size] of the three ranges that `shares` describes.

    Shares are normalised; each part is rounded, and the total rounding error shifts all boundaries but the first, as Megatron does. A range
    of few documents may be empty.

    Raises:
        ConfigError: there are more than three shares, one is negative or no number, or all are zero.
    """
    given = list(shares)
    if len(given) > 3 or not all(math.isfinite(s) and s >= 0 for s in given) or sum(given) <= 0:
        raise ConfigError(f"dataloader.split={given}: up to three shares (training, validation, test), none negative, not all zero")
    given += [0.0] * (3 - len(given))
    boundaries = [0]
    for share in given:
        boundaries.append(boundaries[-1] + round(share / sum(given) * size))
    error = boundaries[-1] - size
    return [0] + [min(size, max(0, b - error)) for b in boundaries[1:]]
