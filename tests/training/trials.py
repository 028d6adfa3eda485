"""Small runs for these tests, started on any number of ranks: `ranks(2, run, folder, corpus, overrides)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.small import TINY


def run(folder: str, corpus: str, overrides: list[str], options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train on this rank; return how it ended, or what a user would have read."""
    from dufu.errors import DufuError
    from dufu.training.run import train

    own = [*TINY, f"train.output_dir={folder}", *overrides]
    try:
        outcome = train("gpt2_tiny", own, data=[corpus], **(options or {}))
    except DufuError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"step": outcome.step, "finished": outcome.finished, "metrics": outcome.metrics}


def again(folder: str, overrides: list[str], options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Continue from a run's folder alone."""
    from dufu.errors import DufuError
    from dufu.training.run import train

    try:
        outcome = train(folder, overrides, **{"resume": True, **(options or {})})
    except DufuError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"step": outcome.step, "finished": outcome.finished, "metrics": outcome.metrics}


def one_epoch_of_24_samples(path: Path) -> Path:
    """Write a document of 24 samples of 24 bytes (and the one token more that the last sample predicts)."""
    from tests.small import documents

    path.write_text(" ".join(documents(8)).replace("\n", " ").encode("ascii", "ignore").decode()[: 24 * 24] + "\n")
    return path


def steps(folder: Path) -> list[str]:
    """Return the names of the checkpoints on disk."""
    return sorted(p.name for p in (folder / "checkpoints").glob("step_*"))
