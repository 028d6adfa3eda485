"""Processes that stay alive between jobs, so that a job on several of them costs milliseconds instead of an import of torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from dufu.errors import DufuError

_GRACE_SECONDS = 5.0  # how long the others of a failed job may take to say what happened to them


class WorkerError(Exception):
    """A job failed on one of its processes; `trace` holds that process's traceback, where it left one."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


def free_port() -> int:
    """Return a port that nothing on this host listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _serve(pipe: Connection, parent: int) -> None:
    """Do jobs until the pool is closed or its process is gone."""
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the pool's own process, which ends its workers
    threading.Thread(target=_outlive_nobody, args=(parent,), name="dufu-pool", daemon=True).start()
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            packed = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        pipe.send_bytes(_do(packed))


def _do(packed: bytes) -> bytes:
    """Return the packed (whether it went well, result or error, traceback) of a packed job."""
    answer: tuple[bool, Any, str]
    try:
        function, arguments, environment = pickle.loads(packed)
        os.environ.update(environment)
        answer = (True, function(*arguments), "")
    except DufuError as error:
        answer = (False, error, traceback.format_exc())
    except BaseException as error:
        answer = (False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", traceback.format_exc())
    finally:
        from dufu.parallel.process import leave

        leave()
    try:
        return pickle.dumps(answer)
    except Exception as error:
        return pickle.dumps((False, f"its result cannot be sent back ({error})", traceback.format_exc()))


def _outlive_nobody(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class Pool:
    """Calls a function on several ranks at once: `pool(2, function, *arguments)` returns each rank's result.

    The function and its arguments travel by pickle, so the function must be importable. Each job meets at a port of its own. Workers run
    on one thread each; none outlives the process of the pool.
    """

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._answered: set[int] = set()  # ranks whose process has done a job

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def grow(self, size: int) -> None:
        """Start processes until there are `size`."""
        context = multiprocessing.get_context("spawn")
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see cli.main; read when a worker imports PyTorch
        while len(self._workers) < size:
            mine, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append((worker, mine))

    def close(self) -> None:
        """End all processes."""
        for worker, pipe in self._workers:
            pipe.close()
            worker.kill()
        for worker, _ in self._workers:
            worker.join()
        self._workers.clear()
        self._answered.clear()

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 1800.0) -> list[Any]:
        """Run a job on ranks 0 to size - 1 and return their results.

        Args:
            timeout: seconds after which ranks that have not answered count as stuck.

        Raises:
            DufuError: the one that the function raised. WorkerError: a rank failed in another way, died, or is stuck. After either the
                pool starts anew: a failed collective leaves the others in an unknown state.
        """
        common = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        jobs = [pickle.dumps((function, arguments, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})) for rank in range(size)]
        self.grow(size)
        try:
            for (_, pipe), job in zip(self._workers[:size], jobs):
                with contextlib.suppress(BrokenPipeError, ConnectionError):  # who is gone is found below
                    pipe.send_bytes(job)
            answers = self._collect(size, timeout)
        except BaseException:
            self.close()
            raise
        failures = {rank: answer for rank, answer in sorted(answers.items()) if not answer[0]}
        if failures or len(answers) < size:
            self.close()
            raise _explanation(size, failures, [rank for rank in range(size) if rank not in answers], timeout)
        return [answers[rank][1] for rank in range(size)]

    def _collect(self, size: int, timeout: float) -> dict[int, tuple[bool, Any, str]]:
        """Return the answers that come, and once one is a failure only those that follow soon."""
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:size])}
        answers: dict[int, tuple[bool, Any, str]] = {}
        end = time.monotonic() + timeout
        while pipes:
            ready: Sequence[Any] = wait(list(pipes), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    worker = self._workers[rank][0]
                    worker.join(_GRACE_SECONDS)
                    answers[rank] = (False, _death(worker.exitcode, rank in self._answered), "")
                self._answered.add(rank)
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + _GRACE_SECONDS)
        return answers


def _death(code: int | None, answered: bool) -> str:
    """Say how a process ended that did not finish its job; `answered` whether it had finished others."""
    if code is not None and code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    if answered:
        return f"it ended with status {code}"
    return f'it ended with status {code} (a script that starts processes needs its last lines under `if __name__ == "__main__":`)'


def _explanation(size: int, failures: dict[int, tuple[bool, Any, str]], silent: list[int], timeout: float) -> Exception:
    """Return the error of a failed job: a user's mistake if there is one, then what is no lost connection to another rank."""
    for _, error, _ in failures.values():
        if isinstance(error, DufuError):
            return error
    ranked = sorted(
        failures.items(), key=lambda item: any(word in item[1][1] for word in ("Connection", "gloo", "peer", "Broken pipe"))
    )
    if not ranked:
        return WorkerError(f"process {silent[0]} of {size} did not answer within {timeout:g} s")
    rank, (_, text, trace) = ranked[0]
    return WorkerError(f"process {rank} of {size} failed: {text}", trace)


__all__ = ["Pool", "WorkerError", "free_port"]
