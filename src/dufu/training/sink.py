"""Where numbers go: metrics.jsonl in full precision, the console, log.txt, TensorBoard. Main process only."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dufu.errors import DufuError
from dufu.interchange.files import write_text


class Sink:
    """Writes a run's numbers.

    Args:
        folder: the run's folder; None writes nothing.
        tensorboard: whether to write TensorBoard files.
    """

    def __init__(self, folder: Path | None, tensorboard: bool = True) -> None:
        self.folder = folder
        self.console = folder is not None  # whether anyone reads standard output
        self._writer: Any = None
        self._want_writer = tensorboard and folder is not None
        self._purge: int | None = None
        self._bar: Any = None
        self._log: Any = None
        self._metrics: Any = None
        if folder is not None:
            with self.disk():
                self._log = (folder / "log.txt").open("a", encoding="utf-8")
                self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    @contextmanager
    def disk(self) -> Iterator[None]:
        """Turn a failure to write, such as a full disk, into one line."""
        try:
            yield
        except OSError as error:
            raise DufuError(
                f"{self.folder}: the run's numbers cannot be written ({error.strerror or error}); "
                f"the run can be resumed from its newest checkpoint"
            ) from error

    def note(self, text: str) -> None:
        """Write a line to log.txt."""
        if self._log:
            with self.disk():
                self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
                self._log.flush()

    def say(self, text: str) -> None:
        """Print a line and write it to log.txt."""
        self.note(text)
        if not self.console:
            return
        try:
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, flush=True)
        except BrokenPipeError:
            self.console = False  # whoever read along has gone; log.txt goes on

    def start_progress(self, done: int, total: int) -> None:
        """Show a progress bar on a terminal."""
        if not self.console or not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), transient=True)
        self._bar.add_task("training", total=total, completed=done)
        self._bar.start()

    def progress(self, done: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)

    def stop_progress(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def write(self, record: dict[str, Any]) -> None:
        """Append a record to metrics.jsonl and TensorBoard; a number that is none is written as NaN or Infinity, never smoothed."""
        if self._metrics is None:
            return
        with self.disk():
            self._metrics.write(json.dumps(record) + "\n")
            self._metrics.flush()
        if self._want_writer:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self._purge)  # type: ignore[operator]
            prefix = record.get("split", "train")
            for name, value in record.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step":
                    self._writer.add_scalar(f"{prefix}/{name}", value, record["step"])

    def resume_at(self, step: int) -> None:
        """Drop the records past a step, so that the files of an interrupted run read like those of one undisturbed."""
        self._purge = step + 1
        if self._metrics is not None and self.folder is not None:
            self._metrics.close()
            with self.disk():
                trim_metrics(self.folder / "metrics.jsonl", step)
                self._metrics = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the files."""
        self.stop_progress()
        for file in (self._log, self._metrics, self._writer):
            if file is not None:
                with suppress(OSError):  # what could not be written has been reported when it was written
                    file.close()


def trim_metrics(path: Path, step: int) -> None:
    """Drop the lines past a step, and the torn last line of a killed process."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step and line.endswith("\n"):
                kept.append(line)
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    write_text(path, "".join(kept))


def eta(steps_left: int, seconds_a_step: float) -> str:
    """Return a remaining time as h:mm:ss."""
    if not math.isfinite(seconds_a_step):
        return "?"
    seconds = int(steps_left * seconds_a_step)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
