"""Processes start together, stop together with a checkpoint, and leave nobody behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dufu.parallel.launch import exit_status
from dufu.training.checkpoint import CheckpointReader, latest_checkpoint
from tests.pool import Ranks
from tests.small import TINY, metrics
from tests.training.trials import again

LONG = [*TINY, "train.train_iter=1000000", "train.evaluation.enabled=false"]


@contextmanager
def started(
    *arguments: str, env: dict[str, str] | None = None, module: tuple[str, ...] = ("dufu.cli.main",)
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", *module, *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | (env or {"OMP_NUM_THREADS": "1"})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        for child in [process.pid, *children(process.pid)]:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.communicate()


def children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Any, seconds: float) -> bool:
    """Wait for something that another process does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def training(folder: Path, process: subprocess.Popen[str], step: int = 3) -> bool:
    def under_way() -> bool:
        assert process.poll() is None, process.communicate()
        return (folder / "metrics.jsonl").exists() and len(metrics_so_far(folder)) >= step

    return until(under_way, 120)


def metrics_so_far(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


def complete(folder: Path) -> int:
    """Return the step of the newest checkpoint, which is whole."""
    newest = latest_checkpoint(folder / "checkpoints")
    assert newest is not None
    return int(CheckpointReader(newest).state["step"])


def interrupted(folder: str, corpus: str, number: int) -> int:
    """Send a signal to a run of one process in the midst of training; return its exit status."""
    from dufu.cli.main import run

    child = os.fork()
    if child == 0:
        os._exit(run(["train", "gpt2_tiny", "--data", corpus, *LONG, f"train.output_dir={folder}"]))
    assert until(lambda: (Path(folder) / "metrics.jsonl").exists() and len(metrics_so_far(Path(folder))) > 2, 60)
    os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_a_checkpoint(number: int, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    assert ranks(1, interrupted, str(tmp_path), str(corpus), int(number))[0] == 128 + number
    step = complete(tmp_path)
    assert step == len(metrics_so_far(tmp_path))
    assert ranks(1, again, str(tmp_path), [f"train.stop_at_step={step + 1}"])[0]["step"] == step + 1


def test_two_launches_share_the_cores_and_no_port_and_end_on_signals(corpus: Path, tmp_path: Path) -> None:
    common = ["train", "gpt2_tiny", "--data", str(corpus), "--nproc", "2", *LONG]
    cores = len(os.sched_getaffinity(0))
    with socket.socket() as occupied:
        occupied.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            occupied.bind(("127.0.0.1", 29500))
            occupied.listen()
        except OSError:
            pass  # something else has it: as good
        with (
            started(*common, f"train.output_dir={tmp_path}/a", env={"OTHER": ""}) as a,
            started(*common, f"train.output_dir={tmp_path}/b", env={"OMP_NUM_THREADS": "3"}) as b,
        ):
            cases = ((a, "a", max(1, cores // 2), signal.SIGTERM), (b, "b", 3, signal.SIGINT))
            for process, name, threads, number in cases:
                assert training(tmp_path / name, process)
                workers = children(process.pid)
                assert len(workers) == 2
                for worker in workers:
                    environment = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
                    assert f"OMP_NUM_THREADS={threads}".encode() in environment
                process.send_signal(number)
                _, err = process.communicate(timeout=15)
                assert (process.returncode, err) == (128 + number, "")
                assert not [pid for pid in workers if alive(pid)]
                assert complete(tmp_path / name) == len(metrics_so_far(tmp_path / name))


def test_a_signal_to_one_worker_ends_all(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", "gpt2_tiny", "--data", str(corpus), "--nproc", "2", *LONG, f"train.output_dir={folder}"]
    with started(*arguments) as process:
        assert training(folder, process)
        workers = children(process.pid)
        os.kill(workers[1], signal.SIGTERM)
        _, err = process.communicate(timeout=15)
    assert (process.returncode, err) == (143, "")
    assert not [pid for pid in workers if alive(pid)]
    assert complete(folder) == len(metrics_so_far(folder))


def test_workers_end_when_their_launcher_is_killed(corpus: Path, ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", "gpt2_tiny", "--data", str(corpus), "--nproc", "2", *LONG, f"train.output_dir={folder}"]
    with started(*arguments) as process:
        assert training(folder, process)
        workers = children(process.pid)
        process.kill()
        assert until(lambda: not any(alive(pid) for pid in workers), 15)
    step = complete(folder)
    assert ranks(1, again, str(folder), [f"train.stop_at_step={step + 1}"])[0]["step"] == step + 1
    assert [r["step"] for r in metrics(folder)] == list(range(1, step + 2))


def stuck(folder: str, corpus: str) -> tuple[float, int]:
    """Send two signals to a process that hangs after a step; return how long it took to end, and by which signal."""
    from dufu.training.hooks import Hook
    from dufu.training.run import train

    class Hang(Hook):
        def after_step(self, trainer: Any) -> None:
            (Path(folder) / "hangs").touch()
            time.sleep(60)

    Path(folder).mkdir()
    child = os.fork()
    if child == 0:
        train("gpt2_tiny", [*LONG, f"train.output_dir={folder}"], data=[corpus], hooks=[Hang()])
        os._exit(0)
    assert until((Path(folder) / "hangs").exists, 60)
    began = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(child, number)
        time.sleep(0.2)
    _, status = os.waitpid(child, 0)
    return time.monotonic() - began, os.WTERMSIG(status)


def test_a_second_signal_ends_at_once(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    seconds, number = ranks(1, stuck, str(tmp_path / "run"), str(corpus))[0]
    assert seconds < 10 and number == signal.SIGINT


CRASHING = """
import os
from dufu.data import CausalLMDataset

class Data(CausalLMDataset):
    def __getitem__(self, index):
        if os.environ.get("RANK") == "1" and (os.environ.get("HOW") != "late" or os.path.exists(os.environ["MARK"])):
            raise ValueError("a crash of one rank")
        return super().__getitem__(index)
"""


def test_a_crash_of_one_rank_ends_all_with_its_traceback(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1", "HOW": "late",
           "MARK": str(tmp_path / "now")}  # fmt: skip
    folder = tmp_path / "run"
    arguments = ["--trust", "crashing", "--data", str(corpus), "--nproc", "2", *LONG, f"train.output_dir={folder}"]
    with started("train", "gpt2_tiny", *arguments, "dataloader.dataset._target_=crashing.Data", env=env) as process:
        assert training(folder, process)
        workers = children(process.pid)
        (tmp_path / "now").touch()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.count("Traceback") == 1 and "ValueError: a crash of one rank" in err
    assert not [pid for pid in workers if alive(pid)]


def test_a_killed_worker_is_named_and_ends_the_run(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", "gpt2_tiny", "--data", str(corpus), "--nproc", "2", *LONG, f"train.output_dir={folder}"]
    with started(*arguments) as process:
        assert training(folder, process)
        workers = children(process.pid)
        os.kill(workers[1], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(r"process \d was ended by SIGKILL", err)
    assert not [pid for pid in workers if alive(pid)]


def test_torchrun_starts_it_too(corpus: Path, tmp_path: Path) -> None:
    own = ["-m", "dufu.cli.main", "train", "gpt2_tiny", "--data", str(corpus), *TINY, f"train.output_dir={tmp_path}/run"]
    launcher = ("torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0", "--standalone")
    with started(*own, module=launcher) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "dp2:" in out and out.count("step 6/6") == 1
    assert [r["step"] for r in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("codes", "status"),
    [([], 0), ([1, 2], 2), ([143, 0], 143), ([-15], 143), ([-2, -15], 130), ([1, -15], 1), ([-9, -15], 1), ([130, 1], 130)],
)
def test_the_first_process_to_fail_gives_the_status(codes: list[int], status: int) -> None:
    assert exit_status(codes) == status
