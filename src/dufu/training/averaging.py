"""Averaged weights (EMA): kept beside the trained ones, in their layout, and used where a model is judged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dufu.errors import ConfigError
from dufu.parallel.store import ParameterStore
from dufu.training.checkpoint import AVERAGE, CheckpointReader
from dufu.training.hooks import Hook

if TYPE_CHECKING:
    from dufu.training.loop import Trainer


class Averages(Hook):
    """Keeps a ← decay·a + (1 - decay)·p of every trained weight p, in float32, from its first value on; skipped updates do not count.

    Each process averages what it updates, so the averages are divided and sharded as the weights are. Before hooks that evaluate or save.

    Args:
        decay: share of the average kept at each step, in [0, 1).

    Raises:
        ConfigError: a decay outside.
    """

    def __init__(self, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"train.ema.decay={decay}: in [0, 1), such as 0.999")
        self.decay = decay
        self.values: list[Tensor] = []  # one for each of the store's trained entries

    def before_train(self, trainer: Trainer) -> None:
        """Begin with the weights as they are, unless averages were loaded."""
        if not self.values:
            self.values = [e.tensor.detach().float().clone() for e in trainer.train_step.distributed.store.entries]

    def after_step(self, trainer: Trainer) -> None:
        """See Hook."""
        if not trainer.train_step.skipped:
            weights = [e.tensor.detach().float() for e in trainer.train_step.distributed.store.entries]
            torch._foreach_lerp_(self.values, weights, 1.0 - self.decay)

    def load(self, reader: CheckpointReader, store: ParameterStore) -> None:
        """Take over the averages of a checkpoint, whatever its layout."""
        self.values = [torch.zeros_like(e.tensor, dtype=torch.float32) for e in store.entries]
        for entry, values in zip(store.entries, self.values):
            flat = values.view(-1)
            for piece in entry.pieces:
                reader.fill(AVERAGE, piece, flat[piece.start : piece.start + piece.length])

    @contextmanager
    def in_use(self, store: ParameterStore) -> Iterator[None]:
        """Let the model compute with the averages; afterwards the weights are what they were, to the last bit."""
        weights = [entry.tensor.detach() for entry in store.entries]
        kept = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, self.values)
        store.publish()
        try:
            yield
        except BaseException:
            torch._foreach_copy_(weights, kept)  # without a message: after an error the other processes may be anywhere
            raise
        torch._foreach_copy_(weights, kept)
        store.publish()


def averages_of(trainer: Trainer) -> Averages | None:
    """Return the averages that a run keeps, if it does."""
    return next((hook for hook in trainer.hooks if isinstance(hook, Averages)), None)


@contextmanager
def averaged(trainer: Trainer) -> Iterator[None]:
    """Let the model compute with averaged weights, where the run keeps them."""
    averages = averages_of(trainer)
    if averages is None:
        yield
        return
    with averages.in_use(trainer.train_step.distributed.store):
        yield
