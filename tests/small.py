"""Small real things for tests: text that Python ships, and configs that train in a second."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

# A model of two layers, 32 wide, with dropout everywhere; eight samples a step.
TINY = [
    "model.cfg.hidden_size=32", "model.cfg.ffn_hidden_size=64", "model.cfg.max_seq_length=24", "model.cfg.num_attention_heads=4",
    "train.global_batch_size=8", "train.train_iter=6", "train.log_period=1", "train.tensorboard=false",
    "train.checkpointer.period=1000", "train.evaluation.eval_period=1000",
]  # fmt: skip


def documents(limit: int = 60) -> list[str]:
    """Return paragraphs of Python's help topics, each on one line."""
    found = []
    for name in sorted(topics):
        found += [" ".join(part.split()) for part in topics[name].split("\n\n") if len(part) > 80]
    return found[:limit]


def write_corpus(path: Path, limit: int = 60) -> Path:
    path.write_text("\n".join(documents(limit)) + "\n", encoding="utf-8")
    return path


def metrics(folder: Path | str, split: str | None = None) -> list[dict[str, Any]]:
    """Return the records of a run, without the times."""
    out = []
    for line in (Path(folder) / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record.get("split") == split:
            out.append({k: v for k, v in record.items() if k not in ("tokens_per_second", "step_seconds")})
    return out


def dufu(
    *arguments: str, cwd: Path | None = None, timeout: float = 300, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does."""
    import os

    command: Sequence[str] = [sys.executable, "-m", "dufu.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, timeout=timeout, capture_output=True, text=True, env={**os.environ, **(env or {})})
