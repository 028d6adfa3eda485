"""A pool of processes that stay alive between tests, so that a distributed test costs milliseconds instead of an import of torch."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        function, arguments, environment = job
        os.environ.update(environment)
        try:
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            from dufu.parallel.process import leave

            leave()
        pipe.send(answer)


class Ranks:
    """Calls a top-level function on several ranks at once: `ranks(2, function, *arguments)` returns each rank's result."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def _grow(self, size: int) -> None:
        context = mp.get_context("spawn")
        while len(self._workers) < size:
            mine, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append((worker, mine))

    def close(self) -> None:
        for worker, pipe in self._workers:
            pipe.close()
            worker.kill()
            worker.join()
        self._workers.clear()

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        self._grow(size)
        common = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            pipe.send((function, arguments, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
        answers = []
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            if not pipe.poll(timeout):
                self.close()
                raise AssertionError(f"rank {rank} of {size} did not answer within {timeout} s; earlier ranks: {answers}")
            answers.append(pipe.recv())
        for rank, (fine, answer) in enumerate(answers):
            if not fine:
                self.close()  # a failed collective leaves the others in an unknown state
                raise AssertionError(f"rank {rank} of {size} failed:\n{answer}")
        return [answer for _, answer in answers]
