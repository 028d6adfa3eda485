"""Which samples, when, on which process. What a sample is belongs to the dataset; here is only the order, and it is a formula.

Sample number s of the run, counted from 0 over all epochs, is dataset item permute(s mod n) of epoch s div n. The whole state is the
number of samples consumed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dufu.data.blend import sample_of
from dufu.data.permutation import permute
from dufu.errors import DataError

Numbers = npt.NDArray[np.int64]


class Feed:
    """Deals a dataset's samples in global batches.

    Args:
        dataset: has `len` and items that are dicts of arrays; `item(index, epoch)` if an item differs by epoch.
        global_batch: samples of a step over all processes.
        seed: of the order.
        shuffle: whether each epoch has its own order.
    """

    def __init__(self, dataset: Any, global_batch: int, seed: int, shuffle: bool = True) -> None:
        if len(dataset) == 0:
            raise DataError("the training split holds no sample")
        self.dataset, self.global_batch, self.seed, self.shuffle = dataset, global_batch, seed, shuffle

    def items(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return (dataset index, epoch) of sample numbers."""
        size = len(self.dataset)
        epochs, places = np.divmod(numbers, size)
        return (permute(places, size, self.seed, epochs) if self.shuffle else places), epochs

    def load(self, numbers: Numbers) -> list[dict[str, npt.NDArray[Any]]]:
        """Return the samples of the given numbers."""
        indices, epochs = self.items(numbers)
        return [sample_of(self.dataset, int(i), int(e)) for i, e in zip(indices, epochs)]

    def step_numbers(self, consumed: int) -> Numbers:
        """Return the sample numbers of the global batch that begins after `consumed` samples."""
        return np.arange(consumed, consumed + self.global_batch, dtype=np.int64)

    def fingerprint(self) -> str:
        """Return a hash of what decides the samples and their order: the dataset's own fingerprint and its first, middle and last items."""
        digest = hashlib.sha256()
        size = len(self.dataset)
        digest.update(json.dumps([size, self.seed, self.shuffle, getattr(self.dataset, "fingerprint", None)]).encode())
        for index in sorted({0, size // 2, size - 1}):
            for name, value in sorted(self.dataset[index].items()):
                digest.update(name.encode() + np.ascontiguousarray(value).tobytes())
        return digest.hexdigest()[:16]


def shares(numbers: Numbers, parts: int) -> list[Numbers]:
    """Divide a global batch over processes: contiguous, the first ones taking one more where it does not divide."""
    return list(np.array_split(numbers, parts))


def micro_batches(mine: Numbers, largest_share: int, size: int) -> list[Numbers]:
    """Cut a process's share into micro-batches; every process gets the same number of them, the last ones perhaps short or empty."""
    count = -(-largest_share // size)
    return [mine[i * size : (i + 1) * size] for i in range(count)]


def collate(samples: Sequence[dict[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    """Stack samples field by field."""
    return {name: np.stack([s[name] for s in samples]) for name in samples[0]}
