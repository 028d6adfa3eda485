"""A run in which a process does not come to a collective ends within the timeout, and one message says who is where."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dufu.parallel.collectives import Communicator
from dufu.parallel.watch import Watched
from tests.parallel.test_launch import alive, children, started, until
from tests.small import TINY

SCRIPT = """
import os, signal, sys, time
from dufu import train
from dufu.distributed import rank
from dufu.training.hooks import Hook

class Strays(Hook):
    def after_step(self, trainer):
        if trainer.step == 3:
            open(os.environ["MARK"] + str(rank()), "w").write(str(time.time()))
        if os.environ["HOW"] == "unit" and trainer.step == 3 and rank() == 1:
            unit = trainer.train_step.distributed.model.units()["layers.1"]
            unit.register_forward_pre_hook(lambda *_: time.sleep(600))
        elif trainer.step == 3 and rank() == 1:
            world = trainer.train_step.distributed.processes.world
            {"sleeps": lambda: time.sleep(600), "another": lambda: world.objects("something"),
             "frozen": lambda: os.kill(os.getpid(), signal.SIGSTOP)}[os.environ["HOW"]]()

train("gpt2_tiny", sys.argv[2:], data=[sys.argv[1]], hooks=[Strays()])
"""
TIMEOUT = 3


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sleeps", r"process 1 is elsewhere: at \S*strays\.py:\d+ in \S+, called by dufu/training/loop\.py:\d+ in _one_step"),
        ("another", r"process 1 waits in all_gather_object \(number \d+ over world, processes 0, 1\), since"),
        ("frozen", "process 1 does not answer"),
        ("unit", r"process 0 waits in all_reduce .* over tensor, .* of float32 \[8, 24, 32\].* unit layers\.1"),
    ],
)
def test_a_stuck_collective_is_explained(how: str, expected: str, corpus: Path, tmp_path: Path) -> None:
    script = tmp_path / "strays.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HOW": how, "MARK": str(tmp_path / "mark")}
    own = [*TINY, f"train.output_dir={tmp_path}/run", f"train.dist.timeout={TIMEOUT}s"]
    own += ["train.dist.tensor_parallel_size=2"] if how == "unit" else []
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(script),
        str(corpus),
        *own,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    workers: list[int] = []
    try:
        assert until(lambda: (tmp_path / "mark0").exists(), 120), process.communicate()
        workers = children(process.pid)
        first = next(pid for pid in workers if b"RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes())
        began = time.monotonic()
        assert until(lambda: not alive(first), TIMEOUT + 30)
        assert time.monotonic() - began < TIMEOUT + 5
    finally:
        for pid in workers:
            if alive(pid):  # the launcher waits long for one that is frozen
                os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert err.count("stuck: ") == 1
    assert re.search(rf"stuck: \w+ over \w+ has taken longer than train.dist.timeout \({TIMEOUT} s\)", err), err
    assert re.search(
        r"process 0 waits in all_reduce \(number \d+ over \w+, processes 0, 1\) of float\d+ \[[\d, ]+\], [\d,]+ bytes", err
    )
    assert re.search(expected, err), err
    assert ("these are different operations" in err) == (how == "another")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("time.sleep(600)", r"process 1 is elsewhere: .*dufu/training/batches.py:\d+ in step"),
        ("os.kill(os.getpid(), 19)", "process 1 does not answer"),
    ],
)
def test_dufus_launcher_ends_all_with_status_1(how: str, expected: str, corpus: Path, tmp_path: Path) -> None:
    """Data that one process waits for: the others' wait is explained by what it does."""
    (tmp_path / "slow.py").write_text(
        "import os, time\nfrom dufu.data import CausalLMDataset\n\nclass Data(CausalLMDataset):\n    def __getitem__(self, index):\n"
        f"        if os.environ.get('RANK') == '1' and os.path.exists(os.environ['MARK']):\n            {how}\n"
        "        return super().__getitem__(index)\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1", "MARK": str(tmp_path / "now")}
    own = ["--trust", "slow", "--data", str(corpus), "--nproc", "2", *TINY, "train.train_iter=1000000", "train.dist.timeout=2s"]
    own += ["dataloader.dataset._target_=slow.Data", f"train.output_dir={tmp_path}/run"]
    with started("train", "gpt2_tiny", *own, env=env) as process:
        assert until(lambda: (tmp_path / "run/metrics.jsonl").exists() and (tmp_path / "run/metrics.jsonl").stat().st_size, 60)
        workers = children(process.pid)
        (tmp_path / "now").touch()
        began = time.monotonic()
        _, err = process.communicate(timeout=60)
    # The timeout; the answers that are waited for, and the end of those that can run; looking once a second.
    assert time.monotonic() - began < 2 + 5 + 5
    assert process.returncode == 1 and err.count("stuck: ") == 1 and "Traceback" not in err and "SIGKILL" not in err, err
    assert re.search(expected, err), err
    assert not [pid for pid in workers if alive(pid)]


def test_watching_costs_next_to_nothing() -> None:
    """A collective on gloo takes fifty microseconds at least; a note of it must not be seen beside that."""
    group, tensor = Communicator("world", None, [0, 1], 0), torch.zeros(4)
    began = time.perf_counter()
    for _ in range(20000):
        with Watched(group, "all_reduce", tensor):
            pass
    assert (time.perf_counter() - began) / 20000 < 20e-6
    assert group.calls == 20000
