"""Saving and loading beside the disk's own rate: the same bytes written and synced, and read back from a cold cache."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dufu.parallel.layout import ParallelLayout
from dufu.parallel.process import join, settle_allocator
from dufu.training.checkpoint import CheckpointReader, load_optimizer, load_weights
from dufu.training.effective import effective_config
from dufu.training.precision import precision_from_config
from dufu.training.run import build_model, build_optimizer
from dufu.training.writing import Writing, take_pieces


def _timed(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _forget(folder: Path) -> None:
    """Let the system drop a folder's files from its cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _raw_write(path: Path, data: np.ndarray[Any, Any]) -> None:
    with path.open("wb") as file:
        for start in range(0, len(data), 1 << 22):
            file.write(data[start : start + (1 << 22)].data)
        file.flush()
        os.fsync(file.fileno())


def _raw_read(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 22):
                pass


def measure(shape: dict[str, Any], rounds: int) -> list[tuple[str, str, str]]:
    """Return rows of (what, ratio, figure)."""
    sizes = {
        "vocab_size": shape["vocab"], "hidden_layers": shape["layers"], "hidden_size": shape["width"], "ffn_hidden_size": 4 * shape["width"],
        "num_attention_heads": shape["heads"], "max_seq_length": shape["length"],
    }  # fmt: skip
    config = effective_config("gpt2_tiny", [f"model.cfg.{k}={v}" for k, v in sizes.items()])
    settle_allocator()
    processes = join(ParallelLayout(), torch.device("cpu"))
    made = build_model(config, processes, precision_from_config(config.train.amp, processes.device))
    optimizer, _, _ = build_optimizer(config, made)
    for entry in made.store.entries:
        entry.tensor.grad = torch.full_like(entry.tensor, 1e-3)
    optimizer.step()
    times: dict[str, list[float]] = {name: [] for name in ("raw write", "save", "thread", "raw read", "load")}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)

        def save(number: int, in_thread: bool) -> tuple[Path, float]:
            path = folder / f"step_{number:07d}"
            writing: list[Writing] = []

            def begin() -> None:
                pieces = take_pieces(made.store, optimizer, processes, copy=in_thread)
                writing.append(Writing(path, processes, pieces, {}, ""))
                writing[0].begin(in_thread)
                if not in_thread:
                    writing[0].finish(lambda: None)

            seconds = _timed(begin)
            if in_thread:
                while not writing[0].written:
                    time.sleep(0.01)
                seconds += _timed(lambda: writing[0].finish(lambda: None))
            return path, seconds

        path, _ = save(0, False)
        total = sum(p.stat().st_size for p in path.iterdir())
        data = np.frombuffer(os.urandom(1 << 20) * (total >> 20), np.uint8)
        for number in range(1, rounds + 1):
            times["raw write"].append(_timed(lambda: _raw_write(folder / "raw", data)))
            path, seconds = save(2 * number, False)
            times["save"].append(seconds)
            _, seconds = save(2 * number + 1, True)
            times["thread"].append(seconds)
            _forget(path)
            times["raw read"].append(_timed(lambda path=path: _raw_read(path)))  # type: ignore[misc]
            _forget(path)

            def load(path: Path = path) -> None:
                reader = CheckpointReader(path)
                load_weights(reader, made.store)
                load_optimizer(reader, made.store, optimizer)

            times["load"].append(_timed(load))

    def against(one: str, other: str) -> str:
        return f"{statistics.median(a / b for a, b in zip(times[one], times[other])):.2f}"

    def rate(name: str) -> str:
        return f"{total / statistics.median(times[name]) / 1e6:.0f} MB/s"

    return [
        (
            "saving, checksums included / writing the same bytes",
            against("raw write", "save"),
            f"{rate('save')} against {rate('raw write')}",
        ),
        (
            "loading, checksums verified / reading the same bytes",
            against("raw read", "load"),
            f"{rate('load')} against {rate('raw read')}",
        ),
        (
            "time that a step waits, written in a thread / saved at once",
            against("thread", "save"),
            f"{statistics.median(times['thread']):.2f} s",
        ),
    ]
