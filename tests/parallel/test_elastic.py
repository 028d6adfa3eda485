"""A run that loses a process begins again where that can help, and then ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch

from dufu.parallel.team import Failure, Outcome, judge
from dufu.training.checkpoint import CheckpointReader, latest_checkpoint
from tests.parallel.test_launch import alive, children, started, training
from tests.pool import Ranks
from tests.small import TINY, dufu, metrics
from tests.training.trials import run

WORK = [*TINY, "train.train_iter=250", "train.checkpointer.period=20", "train.evaluation.enabled=false"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = latest_checkpoint(folder / "checkpoints")
    assert newest is not None
    reader = CheckpointReader(newest)
    return {name: torch.from_numpy(array) for name, array in arrays(reader).items()}


def arrays(reader: CheckpointReader) -> dict[str, object]:
    from safetensors.numpy import load_file

    return {f"{path.name}/{k}": v for path in sorted(reader.folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def test_a_killed_process_costs_only_the_steps_since_the_checkpoint(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    ranks(2, run, str(tmp_path / "calm"), str(corpus), WORK)
    folder = tmp_path / "run"
    arguments = ["train", "gpt2_tiny", "--data", str(corpus), "--nproc", "2", "--max-restarts", "3", *WORK]
    with started(*arguments, f"train.output_dir={folder}") as process:
        assert training(folder, process, step=50)
        workers = children(process.pid)
        os.kill(random.choice(workers), signal.SIGKILL)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "was ended by SIGKILL" in err and "(restart 1 of 3)" in err
    assert not [pid for pid in workers if alive(pid)]
    assert "resumed at step" in (folder / "log.txt").read_text()
    assert metrics(folder) == metrics(tmp_path / "calm")
    calm, found = weights(tmp_path / "calm"), weights(folder)
    assert calm.keys() == found.keys() and all(torch.equal(calm[name], found[name]) for name in calm)


FAILING = """
import os
from dufu.data import CausalLMDataset
from dufu.errors import DataError
from dufu.parallel import launch

class Data(CausalLMDataset):
    def __getitem__(self, index):
        how, mark = os.environ["HOW"], os.environ["MARK"]
        failed = open(mark).read().split() if os.path.exists(mark) else []
        under_way = launch._step_note._memory is not None and launch._step_note._memory[0] >= 5
        first, again = under_way and not failed, how != "once" and str(index) in failed
        if os.environ.get("RANK") == "1" and (first or again):
            open(mark, "a").write(f"{index}\\n")
            raise DataError("a file that cannot be read") if how == "mistake" else ValueError("a crash")
        return super().__getitem__(index)
"""


@pytest.mark.parametrize(
    ("how", "status", "tries", "message"),
    [
        ("once", 0, 1, "(restart 1 of 3)"),
        ("always", 1, 2, "failed twice at step"),
        ("mistake", 2, 1, "error: a file that cannot be read"),
    ],
)
def test_only_what_may_succeed_is_tried_again(
    how: str, status: int, tries: int, message: str, ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1", "HOW": how,
           "MARK": str(tmp_path / "mark")}  # fmt: skip
    own = ["dataloader.dataset._target_=failing.Data", "train.train_iter=12", "train.checkpointer.period=2"]
    arguments = [
        "train",
        "gpt2_tiny",
        "--trust",
        "failing",
        "--data",
        str(corpus),
        "--nproc",
        "2",
        "--max-restarts",
        "3",
        *TINY,
        *own,
    ]
    done = dufu(*arguments, f"train.output_dir={tmp_path}/run", env=env, timeout=120)
    assert (done.returncode, len((tmp_path / "mark").read_text().split())) == (status, tries), done.stderr
    assert message in done.stderr
    assert done.stderr.count("begins again") == tries - (0 if how == "once" else 1)
    if how == "once":
        ranks(2, run, str(tmp_path / "calm"), str(corpus), own[1:])
        assert metrics(tmp_path / "run") == metrics(tmp_path / "calm")


def test_a_missing_config_is_no_reason_to_try_again(tmp_path: Path) -> None:
    done = dufu("train", str(tmp_path / "none.yaml"), "--nproc", "2", "--max-restarts", "3", timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error:") and "begins again" not in done.stderr


def test_one_process_begins_again_too(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", "gpt2_tiny", "--data", str(corpus), "--max-restarts", "1", *WORK, f"train.output_dir={folder}"]
    with started(*arguments) as process:
        assert training(folder, process, step=30)
        os.kill(children(process.pid)[0], signal.SIGKILL)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert [r["step"] for r in metrics(folder)] == list(range(1, 251))


def test_a_run_to_be_replaced_is_not_taken_up_again(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """An attempt that failed before it touched the folder must not resume what it was to replace."""
    folder = tmp_path / "run"
    ranks(1, run, str(folder), str(corpus), ["train.train_iter=3"])
    (tmp_path / "late.py").write_text(
        "import os\nfrom dufu.data import CausalLMDataset\n\nclass Data(CausalLMDataset):\n    def __init__(self, **a):\n"
        "        if os.environ.get('TORCHELASTIC_RESTART_COUNT') == '0':\n            os._exit(1)\n        super().__init__(**a)\n"
    )
    arguments = ["--trust", "late", "--data", str(corpus), "--nproc", "2", "--max-restarts", "2", *TINY, "train.overwrite=true"]
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    done = dufu("train", "gpt2_tiny", *arguments, "dataloader.dataset._target_=late.Data", f"train.output_dir={folder}", env=env)
    assert done.returncode == 0, done.stderr
    assert "resumed" not in (folder / "log.txt").read_text() and metrics(folder)[-1]["step"] == 6


def outcome(*codes: int, step: int | None = 5) -> Outcome:
    return Outcome([Failure(rank, code, float(rank)) for rank, code in enumerate(codes)], step)


@pytest.mark.parametrize(
    ("outcomes", "earlier", "left", "status", "restart"),
    [
        ([outcome(), outcome()], [], 3, 0, False),
        ([outcome(-9, 1), outcome(1)], [], 3, 1, True),
        ([outcome(-9, 1), outcome(1)], [], 0, 1, False),
        ([outcome(1), outcome(2)], [], 3, 2, False),  # a user's mistake on any host
        ([outcome(143), outcome(143)], [], 3, 143, False),  # the user's wish
        ([outcome(1)], [3], 2, 1, True),
        ([outcome(1)], [3, 5], 1, 1, False),  # the same step again
        ([outcome(1, step=None)], [], 1, 1, True),
        ([outcome(1, step=None)], [None], 1, 1, False),
        ([outcome(1, step=7), outcome(1, step=6)], [7], 1, 1, False),  # the step is the most that any host has begun
    ],
)
def test_what_follows_from_an_attempt(
    outcomes: list[Outcome], earlier: list[int | None], left: int, status: int, restart: bool
) -> None:
    verdict = judge(outcomes, earlier, left)
    assert (verdict.status, verdict.restart) == (status, restart)
