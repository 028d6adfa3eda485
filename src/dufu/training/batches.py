"""From dataset samples to the batches that the model's units read."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dufu.data.feed import Feed, collate, micro_batches, shares
from dufu.layers.loss import IGNORE
from dufu.layers.random import token_keys
from dufu.models.chain import Batch
from dufu.training.batch_size import BatchPlan

Numbers = npt.NDArray[np.int64]
_FIELDS = ("input_ids", "labels", "positions", "documents", "padding", "token_types")
_DECODER = "decoder_"  # how the fields of an encoder-decoder model's second batch begin


def to_batch(
    samples: list[dict[str, npt.NDArray[Any]]], numbers: Numbers, seed: int, step: int | None, device: torch.device
) -> Batch:
    """Stack samples into a batch; fields that begin with `decoder_` make the batch of the decoder.

    Args:
        numbers: each sample's number in the run, for dropout.
        step: number of the step, or None outside training: no dropout keys.
    """
    arrays = {name: torch.from_numpy(value) for name, value in collate(samples).items()}
    own = {name: value for name, value in arrays.items() if not name.startswith(_DECODER)}
    decoders = {name.removeprefix(_DECODER): value for name, value in arrays.items() if name.startswith(_DECODER)}
    batch = _batch(own, numbers, seed, step)
    if decoders:
        batch.decoder = _batch(decoders, numbers, seed, step)
    return batch.to(device)


def _batch(arrays: dict[str, torch.Tensor], numbers: Numbers, seed: int, step: int | None) -> Batch:
    known: dict[str, Any] = {name: arrays[name] for name in _FIELDS if name in arrays}
    extra = {name: value for name, value in arrays.items() if name not in _FIELDS}
    batch = Batch(**known, extra=extra)
    if step is not None:
        places = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
        batch.keys = token_keys(seed, step, torch.from_numpy(numbers), places)
    return batch


def blank(batch: Batch) -> Batch:
    """Return a batch that scores nothing: a process without a sample of its own takes part with it, and adds exactly zero."""
    labels = None if batch.labels is None else torch.full_like(batch.labels, IGNORE)
    extra = {k: torch.full_like(v, IGNORE) if k.endswith("labels") else v for k, v in batch.extra.items()}
    return Batch(
        batch.input_ids, labels, batch.positions, batch.keys, batch.padding, batch.documents, batch.token_types, extra,
        decoder=None if batch.decoder is None else blank(batch.decoder),
    )  # fmt: skip


class TrainingBatches:
    """This process's micro-batches of each step, read one step ahead in a thread.

    Args:
        feed: the order of the samples.
        plan: sizes.
        data_rank, data_size: this process's share.
        seed: of dropout.
        device: where batches go.
    """

    def __init__(self, feed: Feed, plan: BatchPlan, data_rank: int, data_size: int, seed: int, device: torch.device) -> None:
        self.feed, self.plan, self.data_rank, self.data_size = feed, plan, data_rank, data_size
        self.seed, self.device = seed, device
        self._pool = ThreadPoolExecutor(1, "dufu-data")
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def step(self, step: int, consumed: int, last: bool = False) -> list[Batch]:
        """Return the micro-batches of a step that begins after `consumed` samples."""
        if self._ahead is not None and self._ahead[0] == consumed:
            batches = self._ahead[1].result()
        else:
            batches = self._read(step, consumed)
        following = consumed + self.plan.global_batch
        self._ahead = None if last else (following, self._pool.submit(self._read, step + 1, following))
        return batches

    def _read(self, step: int, consumed: int) -> list[Batch]:
        numbers = self.feed.step_numbers(consumed)
        parts = shares(numbers, self.data_size)
        mine = micro_batches(parts[self.data_rank], len(parts[0]), self.plan.micro)
        made = []
        for chosen in mine:
            real = chosen if len(chosen) else numbers[:1]
            batch = to_batch(self.feed.load(real), real, self.seed, step, self.device)
            made.append(batch if len(chosen) else blank(batch))
        return made

    def trial(self) -> Batch:
        """Return a batch of the first sample, to see whether the model takes it."""
        numbers = self.feed.step_numbers(0)[:1]
        return to_batch(self.feed.load(numbers), numbers, self.seed, 0, self.device)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def evaluation_batches(
    dataset: Any, micro: int, data_rank: int, data_size: int, device: torch.device, limit: int | None = None
) -> Iterator[Batch]:
    """Yield this process's micro-batches of a dataset: each sample once over all processes, as many batches on each.

    Args:
        limit: most samples over all processes, the first ones.
    """
    everything = np.arange(len(dataset) if limit is None else min(limit, len(dataset)), dtype=np.int64)
    parts = shares(everything, data_size)
    chosen = micro_batches(parts[data_rank], len(parts[0]), micro)
    for numbers in chosen:
        real = numbers if len(numbers) else everything[:1]
        batch = to_batch([dataset[int(i)] for i in real], real, 0, None, device)
        yield batch if len(numbers) else blank(batch)
