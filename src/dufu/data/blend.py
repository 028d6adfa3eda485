"""Several datasets as one: which sample of which dataset stands at a place is a formula of the place."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from dufu.errors import ConfigError


class Concatenated:
    """Datasets one after another: each sample once an epoch."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self._ends = list(np.cumsum([len(p) for p in parts]).tolist())

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        number = bisect.bisect_right(self._ends, index)
        return self.parts[number][index - (self._ends[number - 1] if number else 0)]


class Weighted:
    """Datasets in given shares: an epoch ends when the scarcest dataset, by its share, has been seen once.

    The others are seen in part that epoch; which part moves on with the epoch, so that over epochs each of their samples comes equally
    often. Places are dealt by the error-accumulating rule of Bresenham, so that every stretch of an epoch has the right mixture.

    Args:
        parts: the datasets.
        weights: share of each, positive.
    """

    def __init__(self, parts: Sequence[Any], weights: Sequence[float]) -> None:
        if len(parts) != len(weights) or min(weights, default=0) <= 0:
            raise ConfigError(f"dataloader.weights={list(weights)}: one positive number for each of the {len(parts)} data files")
        self.parts = list(parts)
        total = sum(weights)
        self.shares = [w / total for w in weights]
        size = min(len(p) / s for p, s in zip(parts, self.shares))
        self.counts = [max(1, int(size * s)) for s in self.shares]
        order = np.concatenate([(np.arange(n) + 0.5) / n for n in self.counts])
        owner = np.repeat(np.arange(len(parts), dtype=np.int16), self.counts)
        within = np.concatenate([np.arange(n) for n in self.counts])
        rank = np.argsort(order, kind="stable")
        self._owner, self._within = owner[rank], within[rank]

    def __len__(self) -> int:
        return len(self._owner)

    def item(self, index: int, epoch: int) -> Any:
        """Return the sample at a place of an epoch."""
        number = int(self._owner[index])
        count, part = self.counts[number], self.parts[number]
        return part[(epoch * count + int(self._within[index])) % len(part)]

    def __getitem__(self, index: int) -> Any:
        return self.item(index, 0)
