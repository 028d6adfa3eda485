"""The order of samples: a bijection for every size, its own for each epoch and seed."""

from __future__ import annotations

import numpy as np
import pytest

from dufu.data.permutation import permute, unpermute


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4095, 4097, 65537])
def test_every_number_comes_once_and_goes_back(size: int) -> None:
    numbers = np.arange(size)
    for seed, epoch in ((0, 0), (1234, 7), (-5, 3), (1 << 70, 1 << 40)):
        moved = permute(numbers, size, seed, epoch)
        assert np.array_equal(np.sort(moved), numbers)
        assert np.array_equal(unpermute(moved, size, seed, epoch), numbers)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    """B091: 22 items, three epochs, two seeds; repeatable."""
    orders = {(s, e): tuple(permute(np.arange(22), 22, s, e).tolist()) for s in (1, 2) for e in range(3)}
    assert len(set(orders.values())) == 6
    assert all(orders[s, e] == tuple(permute(np.arange(22), 22, s, e).tolist()) for s, e in orders)


def test_each_number_may_have_its_own_epoch() -> None:
    epochs = np.arange(50) % 3
    moved = permute(np.arange(50), 50, 9, epochs)
    for i in range(50):
        assert moved[i] == permute(np.array([i]), 50, 9, int(epochs[i]))[0]


def test_very_large_sizes_need_no_table() -> None:
    size = 10**15
    numbers = np.array([0, 1, size // 2, size - 1])
    moved = permute(numbers, size, 5, 1)
    assert ((moved >= 0) & (moved < size)).all() and len(set(moved.tolist())) == 4
    assert np.array_equal(unpermute(moved, size, 5, 1), numbers)


def test_places_are_evenly_spread() -> None:
    """Over 2,000 epochs each of 10 items stands first about 200 times: within 5 standard deviations (13.4) of it."""
    first = permute(np.zeros(2000, np.int64), 10, 3, np.arange(2000))
    assert np.abs(np.bincount(first, minlength=10) - 200).max() < 68
