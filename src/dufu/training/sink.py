"""Where numbers go: metrics.jsonl in full precision, the console, log.txt, TensorBoard. Main process only."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from dufu.training.checkpoint import write_text


class Sink:
    """Writes a run's numbers.

    Args:
        folder: the run's folder; None writes nothing.
        tensorboard: whether to write TensorBoard files.
        console: whether to print.
    """

    def __init__(self, folder: Path | None, tensorboard: bool = True, console: bool = True) -> None:
        self.folder, self.console = folder, console
        self._writer: Any = None
        self._want_writer = tensorboard and folder is not None
        self._log = (folder / "log.txt").open("a", encoding="utf-8") if folder else None
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8") if folder else None
        self._began = time.monotonic()

    def reopen(self) -> None:
        """Open metrics.jsonl anew after it was replaced."""
        if self._metrics is not None and self.folder is not None:
            self._metrics.close()
            self._metrics = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")

    def say(self, text: str) -> None:
        """Print a line and write it to log.txt."""
        if self._log:
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._log.flush()
        if self.console and self.folder is not None:
            print(text, flush=True)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record to metrics.jsonl and TensorBoard; a number that is none is written as NaN or Infinity, never smoothed."""
        if self._metrics is None:
            return
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        if self._want_writer:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self.folder / "tensorboard"))  # type: ignore[operator]
            prefix = record.get("split", "train")
            for name, value in record.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step":
                    self._writer.add_scalar(f"{prefix}/{name}", value, record["step"])

    def close(self) -> None:
        """Close the files."""
        for file in (self._log, self._metrics, self._writer):
            if file is not None:
                file.close()


def trim_metrics(path: Path, step: int) -> None:
    """Drop the lines past a step, so that the file of an interrupted run reads like that of one undisturbed."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step and line.endswith("\n"):
                kept.append(line)
        except (json.JSONDecodeError, KeyError, TypeError):
            continue  # the torn last line of a killed process
    write_text(path, "".join(kept))


def eta(steps_left: int, seconds_a_step: float) -> str:
    """Return a remaining time as h:mm:ss."""
    if not math.isfinite(seconds_a_step):
        return "?"
    seconds = int(steps_left * seconds_a_step)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def warn(text: str) -> None:
    """Print a warning to standard error."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
