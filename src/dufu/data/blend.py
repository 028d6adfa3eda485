"""Several datasets as one: which sample of which dataset stands at a place is a formula of the place."""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from dufu.errors import ConfigError


def sample_of(dataset: Any, index: int, epoch: int) -> Any:
    """Return a dataset's sample as it is in an epoch: by `item(index, epoch)` where its samples differ by epoch."""
    by_epoch = getattr(dataset, "item", None)
    return dataset[index] if by_epoch is None else by_epoch(index, epoch)


def joint_fingerprint(parts: Sequence[Any], *facts: Any) -> str:
    """Return a hash of what decides the samples of several datasets."""
    known = [getattr(part, "fingerprint", len(part)) for part in parts]
    return hashlib.sha256(repr((known, facts)).encode()).hexdigest()[:16]


class Concatenated:
    """Datasets one after another: each sample once an epoch."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self._ends = np.cumsum([len(p) for p in parts], dtype=np.int64).tolist()
        self.fingerprint = joint_fingerprint(self.parts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends else 0

    def item(self, index: int, epoch: int) -> Any:
        """Return the sample at a place of an epoch."""
        number = bisect.bisect_right(self._ends, index)
        return sample_of(self.parts[number], index - (self._ends[number - 1] if number else 0), epoch)

    def __getitem__(self, index: int) -> Any:
        number = bisect.bisect_right(self._ends, index)
        part, place = self.parts[number], index - (self._ends[number - 1] if number else 0)
        return part[place] if hasattr(part, "__getitem__") else sample_of(part, place, 0)


class Weighted:
    """Datasets in given shares: an epoch is as long as the scarcest dataset, by its share, lasts.

    The places of all epochs are counted on, and dealt by exact fractions (a chain of Bresenham's lines): any n places in a row hold n × share
    samples of a dataset, up to less than 1 for each dataset in the list, and each dataset's own samples come one after another, so that over
    the epochs all of them come equally often. Nothing is kept in memory.

    Args:
        parts: the datasets.
        weights: share of each, positive.

    Raises:
        ConfigError: not one positive number for each dataset.
    """

    def __init__(self, parts: Sequence[Any], weights: Sequence[float]) -> None:
        if len(parts) != len(weights) or not all(math.isfinite(w) and w > 0 for w in weights):
            raise ConfigError(f"dataloader.weights={list(weights)}: one positive number for each of the {len(parts)} data files")
        self.parts = list(parts)
        exact = [Fraction(w) for w in weights]
        self.shares = [w / sum(exact) for w in exact]
        # A dataset's share of what the ones before it in the list leave.
        self._claims = [w / sum(exact[i:]) for i, w in enumerate(exact)]
        self._size = max(1, int(min(len(p) / s for p, s in zip(parts, self.shares))))
        self.fingerprint = joint_fingerprint(self.parts, self.shares)

    def __len__(self) -> int:
        return self._size

    def place(self, number: int) -> tuple[int, int]:
        """Return (dataset, number of its sample), both counted from the run's beginning, of a place so counted."""
        for part, claim in enumerate(self._claims):
            before = number * claim.numerator // claim.denominator
            if (number + 1) * claim.numerator // claim.denominator > before:
                return part, before
            number -= before
        raise AssertionError("the last dataset claims all that is left")

    def item(self, index: int, epoch: int) -> Any:
        """Return the sample at a place of an epoch."""
        number, turn = self.place(epoch * self._size + index)
        part = self.parts[number]
        return sample_of(part, turn % len(part), turn // len(part))

    def __getitem__(self, index: int) -> Any:
        return self.item(index, 0)
