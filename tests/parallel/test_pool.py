"""The pool of processes: each rank's result, one clear reason when a rank fails, and a fresh start afterwards."""

from __future__ import annotations

import os
import signal

import pytest

from dufu.errors import ConfigError
from dufu.parallel.pool import Pool, WorkerError


def place(offset: int) -> tuple[int, int, str]:
    return int(os.environ["RANK"]) + offset, int(os.environ["WORLD_SIZE"]), os.environ["OMP_NUM_THREADS"]


def fail(rank: int, how: str) -> None:
    """Fail on one rank, while the other waits for it."""
    import torch
    import torch.distributed as dist

    from dufu.parallel.layout import ParallelLayout
    from dufu.parallel.process import join

    processes = join(ParallelLayout(data=2), torch.device("cpu"))
    if dist.get_rank() == rank:
        if how == "mistake":
            raise ConfigError("no such key")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stuck":
            signal.pause()
        raise ValueError("odd\nand more")
    processes.world.barrier()


def test_each_rank_has_its_place_and_one_thread() -> None:
    with Pool() as pool:
        assert pool(2, place, 10) == [(10, 2, "1"), (11, 2, "1")]
        assert pool(1, place, 0) == [(0, 1, "1")]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_is_told_in_one_line_and_the_pool_goes_on(rank: int) -> None:
    with Pool() as pool:
        for how, error, said in (
            ("mistake", ConfigError, "^no such key$"),
            ("killed", WorkerError, f"^process {rank} of 2 failed: it was ended by SIGKILL$"),
            ("odd", WorkerError, f"^process {rank} of 2 failed: ValueError: odd$"),
        ):
            with pytest.raises(error, match=said):
                pool(2, fail, rank, how, timeout=60)
            assert pool(2, place, 0)[1][0] == 1


def test_a_rank_that_does_not_answer_is_named() -> None:
    with Pool() as pool, pytest.raises(WorkerError, match="did not answer within 12 s"):
        pool(2, fail, 1, "stuck", timeout=12)
