"""Interleaved rounds: every contender waits in processes of its own, and they take turns, so that the machine's moods fall on all alike."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp

Step = Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    """One way of doing the work.

    Args:
        name: for the table.
        build: a top-level function; called in each process with `arguments`, it returns the function that is timed.
        arguments: of `build`.
        processes: how many take part.
        threads: of each.
        work: units (tokens) of one step over all processes, for rates.
    """

    name: str
    build: Callable[..., Step]
    arguments: tuple[Any, ...] = ()
    processes: int = 1
    threads: int = 2
    work: float = 1.0


@dataclass(frozen=True)
class Result:
    """Seconds a step: median, smallest and largest of the rounds."""

    median: float
    least: float
    most: float
    rounds: list[float]


def _serve(pipe: Connection, contender: Contender, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    try:
        import torch

        torch.set_num_threads(contender.threads)
        step = contender.build(*contender.arguments)
        pipe.send("ready")
        while True:
            count = pipe.recv()
            if count == 0:
                return
            began = time.perf_counter()
            for _ in range(count):
                step()
            pipe.send(time.perf_counter() - began)
    except EOFError:
        return
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


def _answer(pipe: Connection, timeout: float) -> Any:
    if not pipe.poll(timeout):
        raise RuntimeError(f"a contender did not answer within {timeout} s")
    value = pipe.recv()
    if isinstance(value, str) and value != "ready":
        raise RuntimeError(value)
    return value


def measure(
    contenders: list[Contender], rounds: int = 7, steps: int = 2, warmup: int = 2, timeout: float = 300
) -> dict[str, Result]:
    """Return each contender's time a step; the first `warmup` steps of each are not counted."""
    context = mp.get_context("spawn")
    running: list[tuple[Contender, list[Any], list[Connection]]] = []
    try:
        for contender in contenders:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            workers, pipes = [], []
            for rank in range(contender.processes):
                mine, theirs = context.Pipe()
                environment = {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(contender.processes), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(contender.threads),
                }  # fmt: skip
                worker = context.Process(target=_serve, args=(theirs, contender, environment), daemon=True)
                worker.start()
                workers.append(worker)
                pipes.append(mine)
            for pipe in pipes:
                _answer(pipe, timeout)
            running.append((contender, workers, pipes))
        times: dict[str, list[float]] = {c.name: [] for c in contenders}
        for turn in range(rounds + 1):
            order = running if turn % 2 else running[::-1]
            for contender, _, pipes in order:
                count = warmup if turn == 0 else steps
                for pipe in pipes:
                    pipe.send(count)
                slowest = max(_answer(pipe, timeout) for pipe in pipes)
                if turn:
                    times[contender.name].append(slowest / count)
        return {name: Result(statistics.median(t), min(t), max(t), t) for name, t in times.items()}
    finally:
        for _, workers, pipes in running:
            for pipe in pipes:
                with contextlib.suppress(OSError):
                    pipe.send(0)
            for worker in workers:
                worker.join(10)
                if worker.is_alive():
                    worker.kill()


def ratio(results: dict[str, Result], one: str, other: str) -> float:
    """Return the median over rounds of one contender's time over another's of the same round."""
    return statistics.median(a / b for a, b in zip(results[one].rounds, results[other].rounds))


def machine() -> str:
    """Describe the machine and its matrix-multiply rate at this minute."""
    import torch

    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(2048, 768, dtype=dtype)
        b = torch.randn(768, 3072, dtype=dtype)
        best = min(_timed(lambda a=a, b=b: a @ b) for _ in range(10))
        rates.append(f"{2 * 2048 * 768 * 3072 / best / 1e9:.0f} GFLOP/s {str(dtype).removeprefix('torch.')}")
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        name = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "unknown processor")
    return f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, matrix products {', '.join(rates)}"


def _timed(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
