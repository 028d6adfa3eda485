"""The training loop: steps and hooks."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dufu.training.batches import TrainingBatches
from dufu.training.hooks import Hook
from dufu.training.step import OUT_OF_TIME, TrainStep

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Turns the first SIGTERM or SIGINT into a wish to stop after the present step; a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in STOP_SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:
                break  # not the main thread: the caller's signals stay theirs
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for other in self._before:
            # The system's own handling, not Python's, which would wait for a blocked collective to return.
            signal.signal(other, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@dataclass(frozen=True)
class Surroundings:
    """What a hook may want to know of the run it is in.

    Args:
        config: the effective config.
        folder: the run's.
        tokenizer: the run's.
    """

    config: Any
    folder: Path
    tokenizer: Any


class Trainer:
    """Runs steps until an end is reached; everything else is a hook.

    Args:
        train_step: makes one update.
        batches: this process's micro-batches.
        hooks: in the order in which they run.
        train_iter: number of updates of the whole run.
        stop_at_step: end early after this many updates.
        stop_after_seconds: end early after this time.
        surroundings: of the run, for hooks; None where a trainer is built by hand.
    """

    def __init__(
        self,
        train_step: TrainStep,
        batches: TrainingBatches,
        hooks: Sequence[Hook],
        train_iter: int,
        stop_at_step: int | None = None,
        stop_after_seconds: float | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.train_step, self.batches, self.hooks = train_step, batches, list(hooks)
        self.train_iter, self.stop_at_step, self.stop_after_seconds = train_iter, stop_at_step, stop_after_seconds
        self.surroundings = surroundings
        self.step = 0
        self.consumed = 0
        self.finished = False  # whether the run has come to an end of its own (all steps, or early stopping)
        self.ending = False  # whether the step just done is the last of this process
        self.failed = False  # whether an error ends the run; other processes may be anywhere
        self.signal: int | None = None  # what ended it early, the same on every process

    @property
    def last_step(self) -> int:
        """Return the number of updates after which this process ends."""
        return self.train_iter if self.stop_at_step is None else min(self.train_iter, self.stop_at_step)

    def stop(self) -> None:
        """End the run after the present step; for hooks, on every process alike."""
        self.finished = self.ending = True

    def run(self) -> None:
        """Train."""
        began = time.monotonic()
        with StopRequest() as request:
            try:
                for hook in self.hooks:
                    hook.before_train(self)
                while self.step < self.last_step and not self.ending:
                    out_of_time = self.stop_after_seconds is not None and time.monotonic() - began > self.stop_after_seconds
                    self._one_step(request.signal or (OUT_OF_TIME if out_of_time else None))
                self.signal = self.train_step.stop_signal or request.signal
            except BaseException:
                self.failed = True
                raise
            finally:
                for hook in self.hooks:
                    hook.after_train(self)
                self.batches.close()

    def _one_step(self, stop: int | None) -> None:
        for hook in self.hooks:
            hook.before_step(self)
        batches = self.batches.step(self.step, self.consumed, last=self.step + 1 >= self.last_step)
        self.train_step(self.step, batches, stop)
        self.step += 1
        self.consumed += self.batches.plan.global_batch
        self.finished = self.finished or self.step >= self.train_iter
        self.ending = self.step >= self.last_step or self.train_step.stop_seen
        for hook in self.hooks:
            hook.after_step(self)
