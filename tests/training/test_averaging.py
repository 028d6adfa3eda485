"""Averaged weights: the formula, the same in every layout, evaluated with, and exact over a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.errors import ConfigError
from dufu.training.averaging import Averages
from tests.pool import Ranks
from tests.small import TINY, metrics
from tests.training.trials import run

EMA = ["train.ema.enabled=true", "train.ema.decay=0.7", "train.evaluation.eval_period=2", "train.log_period=1"]
ZERO = "train.zero_optimization.enabled=true"
LAYOUTS = {
    "dp2": [],
    "tp2": ["train.dist.tensor_parallel_size=2"],
    "zero2": [ZERO, "train.zero_optimization.stage=2"],
    "zero3": [ZERO, "train.zero_optimization.stage=3"],
}


@pytest.fixture(scope="module")
def whole(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    ranks(1, run, str(folder), str(corpus), EMA)
    return folder


def watched(folder: str, corpus: str, overrides: list[str]) -> float:
    """Train on one process; return how far the averages are from their formula, worked out beside in double precision."""
    from dufu.training.averaging import averages_of
    from dufu.training.hooks import Hook
    from dufu.training.run import train

    class Witness(Hook):
        expected: list[torch.Tensor] = []  # noqa: RUF012
        error = 0.0

        def before_train(self, trainer: Any) -> None:
            self.expected = [e.tensor.detach().double() for e in trainer.train_step.distributed.store.entries]

        def after_step(self, trainer: Any) -> None:
            entries = trainer.train_step.distributed.store.entries
            self.expected = [0.7 * a + 0.3 * e.tensor.detach().double() for a, e in zip(self.expected, entries)]
            found = averages_of(trainer)
            assert found is not None
            self.error = max(float((a - b).abs().max()) for a, b in zip(self.expected, found.values))

    witness = Witness()
    train("gpt2_tiny", [*TINY, f"train.output_dir={folder}", *overrides], data=[corpus], hooks=[witness])
    return witness.error


def test_averages_follow_the_formula(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    error = ranks(1, watched, str(tmp_path / "run"), str(corpus), EMA)[0]
    assert error < 1e-6  # float32 rounding of weights of about 1


def test_training_is_untouched_and_evaluation_is_of_the_averages(whole: Path, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    ranks(1, run, str(tmp_path / "plain"), str(corpus), [o for o in EMA if "ema" not in o])
    assert metrics(tmp_path / "plain") == metrics(whole)  # to the last bit, though two evaluations lie between
    plain, averaged = metrics(tmp_path / "plain", "valid"), metrics(whole, "valid")
    assert [r["step"] for r in averaged] == [2, 4, 6]
    assert all(a["loss"] != p["loss"] for a, p in zip(averaged, plain))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_averages_alike(layout: str, whole: Path, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    ranks(2, run, str(tmp_path / "run"), str(corpus), [*EMA, *LAYOUTS[layout]])
    for split in (None, "valid"):
        for a, b in zip(metrics(whole, split), metrics(tmp_path / "run", split), strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)  # fp32 sums in another order


@pytest.mark.parametrize("layout", ["one", "zero3"])
def test_resumed_averages_are_exact(layout: str, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    size, own = (1, []) if layout == "one" else (2, LAYOUTS[layout])
    ranks(size, run, str(tmp_path / "whole"), str(corpus), [*EMA, *own])
    ranks(size, run, str(tmp_path / "parts"), str(corpus), [*EMA, *own, "train.stop_at_step=3"])
    ranks(size, run, str(tmp_path / "parts"), str(corpus), [*EMA, *own], {"resume": True})
    for split in (None, "valid"):
        assert metrics(tmp_path / "parts", split) == metrics(tmp_path / "whole", split)


def test_another_layout_takes_the_averages_over(whole: Path, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    ranks(2, run, folder, str(corpus), [*EMA, *LAYOUTS["zero3"], "train.stop_at_step=3"])
    ranks(2, run, folder, str(corpus), [*EMA, *LAYOUTS["tp2"], "train.stop_at_step=5"], {"resume": True})
    ranks(1, run, folder, str(corpus), EMA, {"resume": True})
    for a, b in zip(metrics(whole, "valid"), metrics(tmp_path / "run", "valid"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def test_a_finished_run_is_evaluated_with_its_averages(whole: Path, ranks: Ranks, corpus: Path) -> None:
    last = metrics(whole, "valid")[-1]
    for size in (1, 2):
        found = ranks(size, run, str(whole), str(corpus), EMA, {"eval_only": True})[0]
        assert found["metrics"]["loss"] == pytest.approx(last["loss"], rel=1e-6)
    without = ranks(1, run, str(whole), str(corpus), [*EMA, "train.ema.enabled=false"], {"eval_only": True})[0]
    assert abs(without["metrics"]["loss"] - last["loss"]) > 1e-4


def test_averages_that_were_never_kept_are_asked_for_in_vain(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    ranks(1, run, str(tmp_path / "run"), str(corpus), ["train.train_iter=1"])
    found = ranks(1, run, str(tmp_path / "run"), str(corpus), EMA, {"eval_only": True})[0]
    assert "holds no averaged weights; set train.ema.enabled=false" in found["error"]


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_a_decay_outside_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match=r"train\.ema\.decay=.*: in \[0, 1\)"):
        Averages(decay)
