"""The hook that writes checkpoints: every period, at the best evaluation, and always at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dufu.training import checkpoint
from dufu.training.hooks import Hook
from dufu.training.reporting import EvaluationHook, MetricsHook
from dufu.training.sink import Sink

if TYPE_CHECKING:
    from dufu.training.loop import Trainer


class CheckpointHook(Hook):
    """Writes `checkpoints/step_…` with everything that a resumed run needs.

    Args:
        sink: for the line that says so.
        folder: the run's `checkpoints` folder.
        period: steps between checkpoints.
        keep: newest ones kept; the best is kept besides.
        config: the effective config as YAML.
        facts: JSON values of the run that do not change (seed, fingerprint, global batch).
    """

    def __init__(self, sink: Sink, folder: Path, period: int, keep: int, config: str, facts: dict[str, Any]) -> None:
        self.sink, self.folder, self.period, self.keep = sink, folder, period, keep
        self.config, self.facts = config, facts
        self.best: str | None = None
        self._saved_step = -1

    def after_step(self, trainer: Trainer) -> None:
        """See Hook."""
        improved = any(isinstance(h, EvaluationHook) and h.improved for h in trainer.hooks)
        if trainer.step % self.period == 0 or improved or trainer.ending:
            self.save(trainer, improved)

    def save(self, trainer: Trainer, is_best: bool) -> None:
        """Write a checkpoint of the present step; called by every process."""
        path = self.folder / checkpoint.step_folder(trainer.step)
        if is_best:
            self.best = path.name
        processes = trainer.train_step.distributed.processes
        checkpoint.save(
            path,
            store=trainer.train_step.distributed.store,
            optimizer=trainer.train_step.optimizer,
            processes=processes,
            state=self._state(trainer),
            config=self.config,
        )
        if processes.is_main:
            if is_best:
                checkpoint.write_text(self.folder / "best", path.name + "\n")
            checkpoint.write_text(self.folder / "latest", path.name + "\n")
            checkpoint.prune(self.folder, self.keep, self.best)
        self._saved_step = trainer.step

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        hooks: dict[str, Any] = {}
        for hook in trainer.hooks:
            state = hook.running(trainer) if isinstance(hook, MetricsHook) else hook.state_dict()
            if state:
                hooks[type(hook).__name__] = state
        scaler = trainer.train_step.scaler
        return {
            **self.facts,
            "step": trainer.step,
            "consumed_samples": trainer.consumed,
            "finished": trainer.finished,
            "train_iter": trainer.train_iter,
            "layout": str(trainer.train_step.distributed.processes.layout),
            "scaler": scaler.state_dict() if scaler else None,
            "hooks": hooks,
        }

    def state_dict(self) -> dict[str, Any]:
        """See Hook."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Hook."""
        self.best = state["best"]
