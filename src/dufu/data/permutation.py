"""A permutation as a formula: the place of sample number i in epoch e is computed, not looked up, so its whole state is (seed, e, i)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_ROUNDS = 6


def _mix(x: _Words) -> _Words:
    """Return SplitMix64's finaliser of each word."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Words = x ^ (x >> np.uint64(31))
    return mixed


def permute(numbers: Numbers, size: int, seed: int, epoch: int | Numbers) -> Numbers:
    """Return where each number goes under the permutation of `range(size)` that belongs to (seed, epoch).

    A Feistel network over the next even power of two, walked until the result lies below `size` (Black and Rogaway, 2002).

    Args:
        numbers: values in [0, size).
        size: how many there are.
        seed, epoch: which permutation; an array gives each number its own epoch.
    """
    return _walk(numbers, size, seed, epoch, range(_ROUNDS))


def unpermute(numbers: Numbers, size: int, seed: int, epoch: int | Numbers) -> Numbers:
    """Return where each number comes from: `unpermute(permute(x)) = x`."""
    return _walk(numbers, size, seed, epoch, range(_ROUNDS - 1, -1, -1))


def _walk(numbers: Numbers, size: int, seed: int, epoch: int | Numbers, turns: range) -> Numbers:
    if size <= 1:
        return np.zeros_like(numbers)
    half = np.uint64(max(1, (int(size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    with np.errstate(over="ignore"):
        start = np.asarray([seed & 0xFFFFFFFFFFFFFFFF], np.uint64)
        key = _mix(_mix(start) + np.atleast_1d(np.asarray(epoch)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        key = np.broadcast_to(key, numbers.shape)
        x = numbers.astype(np.uint64)
        todo = np.ones(numbers.shape, bool)
        while todo.any():
            left, right, k = x[todo] >> half, x[todo] & low, key[todo]
            if turns.step < 0:  # the network backwards is itself with its halves exchanged
                left, right = right, left
            for turn in turns:
                mixed = _mix(right + k + np.uint64(turn + 1) * np.uint64(0xD1B54A32D192ED03)) & low
                left, right = right, left ^ mixed
            if turns.step < 0:
                left, right = right, left
            x[todo] = (left << half) | right
            todo = x >= np.uint64(size)
    return x.astype(np.int64)
