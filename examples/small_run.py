"""What the scripts `show_*.py` share: text that Python ships, a run that takes seconds, and its numbers."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NoReturn

DUFU = [sys.executable, "-m", "dufu.cli.main"]
# Two layers, 32 wide, with dropout everywhere; eight samples a step, a line of numbers for each.
SMALL = [
    "model.cfg.hidden_size=32", "model.cfg.ffn_hidden_size=64", "model.cfg.max_seq_length=24", "model.cfg.num_attention_heads=4",
    "train.global_batch_size=8", "train.log_period=1", "train.tensorboard=false", "train.evaluation.enabled=false",
]  # fmt: skip
Record = dict[str, Any]
_BEGAN = time.monotonic()


def prepare(folder: Path, paragraphs: int = 60) -> Path:
    """Empty a folder and write Python's help topics into it, a paragraph a line; return the file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # One thread each: the processes share few cores, and a small model gains nothing from more.
    os.environ.update(OMP_NUM_THREADS="1", XDG_CACHE_HOME=str((folder / "cache").resolve()))
    found = [" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n") if len(part) > 80]
    text = folder / "topics.txt"
    text.write_text("\n".join(found[:paragraphs]) + "\n", encoding="utf-8")
    return text


def say(message: str) -> None:
    """Print a line with the seconds since the script began."""
    print(f"[{time.monotonic() - _BEGAN:5.1f} s] {message}", flush=True)


def seconds() -> float:
    """Return the seconds since the script began."""
    return time.monotonic() - _BEGAN


def fail(message: str) -> NoReturn:
    """End the script with status 1."""
    sys.exit(f"error: {message}")


def start(command: list[str], shown: str = "", **environment: str) -> subprocess.Popen[str]:
    """Print a command and start it."""
    say(f"$ {shown or ' '.join(['dufu', shlex.join(command[len(DUFU) :])])}")
    pipe = subprocess.PIPE
    return subprocess.Popen(command, text=True, env={**os.environ, **environment}, stdout=pipe, stderr=pipe)


def finish(process: subprocess.Popen[str], limit: float = 300) -> str:
    """Wait for a process that must succeed; return its standard output."""
    out, err = process.communicate(timeout=limit)
    if process.returncode:
        fail(f"the command ended with status {process.returncode}\n{out[-1000:]}{err[-3000:]}")
    return out


def records(run: Path) -> list[Record]:
    """Return a run's numbers, a record a step."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]  # the last line may be half written


def without_times(found: list[Record]) -> list[Record]:
    """Return records without what depends on the clock."""
    return [{k: v for k, v in each.items() if k not in ("tokens_per_second", "step_seconds")} for each in found]


def largest_difference(one: list[Record], other: list[Record]) -> float:
    """Return the largest relative difference of two runs' losses; runs of different steps are an error."""
    if not one or [r["step"] for r in one] != [r["step"] for r in other]:
        fail(f"the runs made different steps: {len(one)} and {len(other)}")
    return max((float(abs(a["loss"] - b["loss"]) / abs(a["loss"])) for a, b in zip(one, other)), default=0.0)


def children(parent: int) -> list[int]:
    """Return the processes that a process has started and that are alive."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [int(pid) for pid, above, state in rows if int(above) == parent and not state.startswith("Z")]


def alive(pid: int) -> bool:
    """Say whether a process runs; one that only waits to be collected does not."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(found) and not found.startswith("Z")
