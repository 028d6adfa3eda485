"""Processes that were given different things say so before the first step, and say what."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Ranks
from tests.small import TINY
from tests.training.trials import run

FACTS = {
    "versions": {"PyTorch": "2.13"},
    "config": {"train.seed": "1", "optim.lr": "0.1"},
    "model (stage 0)": {"head.weight": "[4, 2]"},
}


def differing(rank: int, group: str, name: str, value: str | None, seconds: float) -> str:
    from dufu.errors import DufuError
    from dufu.parallel.agree import agree
    from dufu.parallel.layout import ParallelLayout
    from dufu.parallel.process import choose_device, global_rank, join

    processes = join(ParallelLayout(data=3), choose_device("cpu"))
    facts: dict[str, dict[str, str]] = {name: dict(values) for name, values in FACTS.items()}
    own = global_rank() == rank
    if own and value is not None:
        facts.setdefault(group, {})[name] = value
    try:
        agree(processes, facts, (lambda: time.time() + seconds) if own else time.time)
    except DufuError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("group", "name", "value", "seconds", "message"),
    [
        ("versions", "PyTorch", "2.14", 0.0, "in its versions: PyTorch is 2.14 there and 2.13 here"),
        ("config", "train.seed", "2", 0.0, "in its config: train.seed is 2 there and 1 here"),
        ("model (stage 0)", "head.weight", "[5, 2]", 0.0, "head.weight is [5, 2] there and [4, 2] here"),
        ("config", "train.seed", None, 120.0, "its clock is 120 s ahead of that of process 0"),
        ("config", "train.seed", None, -120.0, "its clock is 120 s behind that of process 0"),
        ("model (stage 1)", "layers.1.weight", "[2, 2]", 0.0, ""),  # another stage's, which no other process has
    ],
)
def test_what_differs_is_named(group: str, name: str, value: str | None, seconds: float, message: str, ranks: Ranks) -> None:
    found = ranks(3, differing, 2, group, name, value, seconds)
    assert len(set(found)) == 1  # on every process
    assert message in found[0] and (found[0].startswith("process 2 (on ") or not message), found[0]


def with_another_seed(folder: str, corpus: str) -> dict[str, Any]:
    from dufu.parallel.process import global_rank

    return run(folder, corpus, [f"train.seed={global_rank()}"])


def test_a_run_with_two_configs_makes_no_step(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    found = ranks(2, with_another_seed, str(tmp_path / "run"), str(corpus))
    assert all("config: train.seed is 1 there and 0 here" in f["error"] for f in found), found
    assert not (tmp_path / "run/metrics.jsonl").read_text()
    assert ranks(2, run, str(tmp_path / "other"), str(corpus), [*TINY, "train.train_iter=1"])[0]["step"] == 1
