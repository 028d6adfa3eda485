"""The run's folder: who may use it, what is resumed in it, what a new run removes from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from dufu.errors import CheckpointError, ConfigError
from dufu.parallel.process import Processes
from dufu.training.checkpoint import CheckpointReader, checkpoints_in, latest_checkpoint

_FOLDERS = ("checkpoints", "tensorboard", "tokenizer")
_FILES = ("metrics.jsonl", "log.txt", "config.yaml", "loss.png")


class RunFolder:
    """`train.output_dir`. Making one reads only; nothing is changed before `prepare`.

    Args:
        path: the folder.
        processes: all that take part.
        resume: whether the run in it is continued.
        overwrite: whether a new run may replace one.

    Raises:
        ConfigError: the folder holds a run that is neither continued nor replaced.
        CheckpointError: the newest checkpoint is damaged.
    """

    def __init__(self, path: Path, processes: Processes, resume: bool, overwrite: bool) -> None:
        self.path, self.processes, self.resume = path, processes, resume
        self.checkpoints = path / "checkpoints"
        if path.exists() and not path.is_dir():
            raise ConfigError(f"train.output_dir={path} is a file; choose another folder")
        newest = latest_checkpoint(self.checkpoints)
        self.used = newest is not None or (path / "metrics.jsonl").exists()
        if self.used and not resume and not overwrite:
            raise ConfigError(
                f"train.output_dir={path} already holds a run; continue it with --resume, replace it with "
                f"train.overwrite=true, or choose another folder"
            )
        self.reader = self._open(newest) if resume and newest else None

    def _open(self, newest: Path) -> CheckpointReader:
        """Open the newest checkpoint; where it is damaged, say what an older one would need."""
        try:
            return CheckpointReader(newest, verify=self.processes.is_main)
        except CheckpointError as error:
            older = [path.name for _, path in checkpoints_in(self.checkpoints)][:-1]
            remedy = f"; remove {newest} to resume from {older[-1]}" if older else ""
            raise CheckpointError(f"{error}{remedy}") from error

    def prepare(self) -> None:
        """Make the folder, emptied of a run that is replaced; called by every process.

        Raises:
            ConfigError: the file system does not allow it; on every process.
        """
        self._main_only(self._prepare)

    def _prepare(self) -> None:
        if self.used and not self.resume:
            for name in _FOLDERS:
                shutil.rmtree(self.path / name, ignore_errors=True)
            for name in _FILES:
                (self.path / name).unlink(missing_ok=True)
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    def _main_only(self, action: Callable[[], None]) -> None:
        failure = ""
        if self.processes.is_main:
            try:
                action()
            except OSError as error:
                failure = str(error)
        failure = self.processes.world.objects(failure)[0]
        if failure:
            raise ConfigError(f"train.output_dir={self.path}: {failure}")
