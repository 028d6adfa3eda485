"""Splits by document."""

from __future__ import annotations

import numpy as np
import pytest

from dufu.data.splits import split_boundaries
from dufu.errors import ConfigError


@pytest.mark.parametrize(
    ("size", "shares", "expected"),
    [
        (1000, (0.8, 0.2), [0, 800, 1000, 1000]),
        (1000, (949, 50, 1), [0, 949, 999, 1000]),
        (100, (949, 50, 1), [0, 95, 100, 100]),
        (10, (949, 50, 1), [0, 10, 10, 10]),
        (11, (1, 1, 1), [0, 3, 7, 11]),
        (1, (0.98, 0.02, 0), [0, 1, 1, 1]),
        (0, (1, 1, 1), [0, 0, 0, 0]),
        (5, (0, 0, 1), [0, 0, 0, 5]),
    ],
)
def test_known_boundaries(size: int, shares: tuple[float, ...], expected: list[int]) -> None:
    """LiBai's and Megatron's values, as calculated for its `get_train_valid_test_split_`."""
    assert split_boundaries(size, shares) == expected


def test_the_ranges_are_disjoint_and_hold_every_document() -> None:
    random = np.random.default_rng(0)
    for _ in range(500):
        size = int(random.integers(0, 60))
        shares = random.random(int(random.integers(1, 4))) + 1e-3
        bounds = split_boundaries(size, shares.tolist())
        assert bounds[0] == 0 and bounds[-1] == size and bounds == sorted(bounds)


@pytest.mark.parametrize("shares", [(), (0, 0, 0), (1, -1), (float("nan"), 1), (1, 1, 1, 1)])
def test_shares_that_describe_nothing(shares: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"dataloader\.split"):
        split_boundaries(10, shares)
