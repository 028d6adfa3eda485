"""The hook that writes checkpoints: every period, at the best evaluation, and always at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dufu.interchange.files import write_text
from dufu.training.averaging import averages_of
from dufu.training.checkpoint import checkpoints_in, prune, remove_leftovers, step_folder
from dufu.training.hooks import Hook, named
from dufu.training.reporting import EvaluationHook
from dufu.training.sink import Sink
from dufu.training.writing import Writing, take_pieces

if TYPE_CHECKING:
    from dufu.training.loop import Trainer


class CheckpointHook(Hook):
    """Writes `checkpoints/step_…` with everything that a resumed run needs.

    Args:
        sink: for the line that says so.
        folder: the run's `checkpoints` folder.
        period: steps between checkpoints.
        keep: newest ones kept; the best is kept besides.
        in_thread: write copies while training goes on, one checkpoint at a time.
        poll: with several processes, steps between looks whether a thread's checkpoint can be completed.
        config: the effective config as YAML.
        facts: JSON values of the run that do not change (seed, fingerprint, global batch).
    """

    def __init__(
        self, sink: Sink, folder: Path, period: int, keep: int, in_thread: bool, poll: int, config: str, facts: dict[str, Any]
    ) -> None:
        self.sink, self.folder, self.period, self.keep = sink, folder, period, keep
        self.in_thread, self.poll, self.config, self.facts = in_thread, poll, config, facts
        self.best: str | None = None
        self._writing: Writing | None = None
        self._best_of_writing: str | None = None

    def before_train(self, trainer: Trainer) -> None:
        """Make `latest` and `best` true again: a killed process may have left them a checkpoint behind."""
        complete = [path.name for _, path in checkpoints_in(self.folder)]
        if self.best not in complete:
            self.best = None
        if trainer.train_step.distributed.processes.is_main:
            with self.sink.disk():
                remove_leftovers(self.folder)
                self._point("best", self.best)
                self._point("latest", complete[-1] if complete else None)

    def _point(self, name: str, to: str | None) -> None:
        path = self.folder / name
        if to is None:
            path.unlink(missing_ok=True)
        else:
            write_text(path, to + "\n")

    def after_step(self, trainer: Trainer) -> None:
        """See Hook."""
        improved = any(isinstance(h, EvaluationHook) and h.improved for h in trainer.hooks)
        due = trainer.step % self.period == 0 or improved or trainer.ending
        if self._writing is not None and (due or self._all_written(trainer)):
            self._complete()
        if due:
            self.save(trainer, improved)

    def _all_written(self, trainer: Trainer) -> bool:
        """Say whether every process's thread is done; the processes ask each other now and then only."""
        assert self._writing is not None
        world = trainer.train_step.distributed.processes.world
        if world.size == 1:
            return self._writing.written
        if trainer.step % self.poll:
            return False
        missing = torch.tensor(float(not self._writing.written), device=trainer.train_step.distributed.processes.device)
        world.sum_(missing)
        return not float(missing)

    def save(self, trainer: Trainer, is_best: bool) -> None:
        """Write a checkpoint of the present step; called by every process."""
        path = self.folder / step_folder(trainer.step)
        if is_best:
            self.best = path.name
        step = trainer.train_step
        processes = step.distributed.processes
        in_thread = self.in_thread and not trainer.ending
        averages = averages_of(trainer)
        pieces = take_pieces(step.distributed.store, step.optimizer, processes, in_thread, averages.values if averages else ())
        self._writing = Writing(path, processes, pieces, self._state(trainer), self.config)
        self._best_of_writing = self.best
        self._writing.begin(in_thread)
        if not in_thread:
            self._complete()

    def _complete(self) -> None:
        """Let the checkpoint that is being written become the newest one; called by every process."""
        writing, best = self._writing, self._best_of_writing
        assert writing is not None
        self._writing = None

        def publish() -> None:
            if best == writing.folder.name:
                self._point("best", best)
            self._point("latest", writing.folder.name)
            prune(self.folder, self.keep, best)

        writing.finish(publish)

    def after_train(self, trainer: Trainer) -> None:
        """See Hook."""
        if self._writing is not None:
            self._writing.abandon()

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        states = {name: hook.state_dict() for name, hook in named(trainer.hooks).items()}
        scaler = trainer.train_step.scaler
        return {
            **self.facts,
            "step": trainer.step,
            "consumed_samples": trainer.consumed,
            "finished": trainer.finished,
            "train_iter": trainer.train_iter,
            "layout": str(trainer.train_step.distributed.processes.layout),
            "scaler": scaler.state_dict() if scaler else None,
            "hooks": {name: state for name, state in states.items() if state},
        }

    def state_dict(self) -> dict[str, Any]:
        """See Hook."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Hook."""
        self.best = state["best"]
