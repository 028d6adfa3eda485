"""Which samples, when, on which process: the same samples in the same order at any world size and from any point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dufu.data.feed import Feed, collate, micro_batches, shares
from dufu.errors import DataError


class Indices:
    """A dataset whose samples are their own index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": np.array([index])}


def consumed(feed: Feed, start: int, steps: int) -> list[int]:
    """Return the indices of some steps, as the loop asks for them."""
    out = []
    for step in range(steps):
        out += [int(s["input_ids"][0]) for s in feed.load(feed.step_numbers(start + step * feed.global_batch))]
    return out


@pytest.mark.parametrize("stop", range(1, 15))
def test_going_on_at_any_step_is_the_same_order(stop: int) -> None:
    """B011, B012, B020: in the middle of an epoch, and at an epoch's end (batches 5, 10, 15)."""
    whole = consumed(Feed(Indices(10), 2, 7), 0, 15)
    again = Feed(Indices(10), 2, 7)
    assert consumed(again, stop * 2, 15 - stop) == whole[stop * 2 :]


def test_each_epoch_is_every_sample_once() -> None:
    """B023, B091: also the epochs after one that was begun in the middle."""
    whole = consumed(Feed(Indices(10), 2, 7), 6, 12)
    assert len(whole[:4]) == 4
    epochs = [whole[4:14], whole[14:24]]
    assert all(sorted(e) == list(range(10)) for e in epochs) and epochs[0] != epochs[1]
    first = consumed(Feed(Indices(10), 2, 7), 0, 5)
    assert sorted(first) == list(range(10)) and whole[:4] == first[6:]


def test_without_shuffling_samples_come_in_their_order() -> None:
    assert consumed(Feed(Indices(5), 2, 7, shuffle=False), 0, 5) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(("size", "batch"), [(3, 4), (1, 4), (3, 10), (7, 4)])
def test_a_batch_may_span_epochs(size: int, batch: int) -> None:
    """B089: fewer samples than a batch still make full batches; over size × n samples each comes n times."""
    seen = consumed(Feed(Indices(size), batch, 1), 0, size * 3)
    assert np.bincount(seen).tolist() == [batch * 3] * size


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_the_processes_together_hold_the_batch_in_order_and_take_as_many_turns(world: int, micro: int) -> None:
    """B088: no process runs out first, also where there are more of them than samples."""
    numbers = np.arange(100, 110)
    parts = shares(numbers, world)
    turns = [micro_batches(part, len(parts[0]), micro) for part in parts]
    assert np.concatenate([m for t in turns for m in t]).tolist() == numbers.tolist()
    assert len({len(t) for t in turns}) == 1
    assert max(len(m) for t in turns for m in t) <= micro


def test_evaluation_counts_each_sample_once_on_any_number_of_processes() -> None:
    """B086: values 0 to 9 on three processes have the mean 4.5 over 10 samples."""
    torch = pytest.importorskip("torch")
    from dufu.training.batches import evaluation_batches

    class Labelled(Indices):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": np.array([index]), "labels": np.array([index])}

    for world in (1, 3, 16):
        scored = []
        for rank in range(world):
            for batch in evaluation_batches(Labelled(10), 2, rank, world, torch.device("cpu")):
                scored += batch.labels[batch.labels >= 0].tolist()
        assert len(scored) == 10 and sum(scored) / 10 == 4.5


def test_no_sample_is_an_error() -> None:
    with pytest.raises(DataError, match="no sample"):
        Feed(Indices(0), 2, 1)


def test_fields_are_stacked() -> None:
    batch = collate([{"a": np.array([1, 2]), "b": np.array(3)}, {"a": np.array([4, 5]), "b": np.array(6)}])
    assert batch["a"].tolist() == [[1, 2], [4, 5]] and batch["b"].tolist() == [3, 6]


def test_the_fingerprint_follows_size_seed_shuffling_and_content() -> None:
    class Other(Indices):
        fingerprint = "another"

    feeds = [
        Feed(Indices(5), 2, 1),
        Feed(Indices(6), 2, 1),
        Feed(Indices(5), 2, 2),
        Feed(Indices(5), 2, 1, False),
        Feed(Other(5), 2, 1),
    ]
    assert len({feed.fingerprint() for feed in feeds}) == 5
    assert Feed(Indices(5), 4, 1).fingerprint() == feeds[0].fingerprint()
