"""Mixed precision: what is half, what is not, and the loss scale."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dufu.config.schema import Amp
from dufu.errors import NonFiniteError
from dufu.parallel.layout import ParallelLayout
from dufu.training.precision import LossScaler, Precision
from tests.pool import Ranks
from tests.small import metrics
from tests.training.plain import Given, rows, sgd, step_of, weight
from tests.training.trials import again, one_epoch_of_24_samples, run

O2 = Precision("O2", torch.float16)


def scaler(**settings: Any) -> LossScaler:
    amp = Amp(**settings)
    return LossScaler(SimpleNamespace(**vars(amp)))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_epoch_of_24_samples(tmp_path_factory.mktemp("text") / "a.txt")


@pytest.fixture(scope="module")
def full(ranks: Ranks, text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("full")
    ranks(1, run, str(folder), str(text), SHORT)
    return metrics(folder)


SHORT = ["dataloader.split=[1.0]", "train.train_iter=5", "train.num_accumulation_steps=2", "optim.lr=1e-3"]


def amp(level: str, dtype: str) -> list[str]:
    return ["train.amp.enabled=true", f"train.amp.level={level}", f"train.amp.dtype={dtype}", "train.amp.init_scale=1024"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_every_level_trains_near_full_precision(
    level: str, dtype: str, full: list[dict[str, Any]], ranks: Ranks, text: Path, tmp_path: Path
) -> None:
    ranks(1, run, str(tmp_path), str(text), [*SHORT, *amp(level, dtype)])
    found = metrics(tmp_path)
    # bf16 has 8 bits: single products are off by 0.4 %, their mean over a batch by far less. At O3 the weights' updates round too.
    tolerance = {"O0": 0.0, "O1": 2e-3, "O2": 2e-3, "O3": 1e-2}[level]
    for a, b in zip(full, found):
        assert b["loss"] == pytest.approx(a["loss"], rel=tolerance, abs=0)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=10 * tolerance, abs=0)
    scaled = dtype == "fp16" and level != "O0"
    assert all(("loss_scale" in r) == scaled for r in found)
    assert not any(r.get("skipped") for r in found)


LAYOUTS = {
    "dp2": (2, []),
    "zero1": (2, ["train.zero_optimization.enabled=true"]),
    "zero2": (2, ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=2"]),
    "zero3": (2, ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"]),
    "tp2": (2, ["train.dist.tensor_parallel_size=2"]),
}


@pytest.fixture(scope="module")
def halves(ranks: Ranks, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for level in ("O2", "O3"):
        folder = tmp_path_factory.mktemp(level)
        ranks(1, run, str(folder), str(text), [*SHORT, *amp(level, "bf16")])
        found[level] = metrics(folder)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_half_weights_are_the_same_in_every_layout(
    level: str, name: str, halves: dict[str, Any], ranks: Ranks, text: Path, tmp_path: Path
) -> None:
    size, layout = LAYOUTS[name]
    ranks(size, run, str(tmp_path), str(text), [*SHORT, *amp(level, "bf16"), *layout])
    # A data-parallel share has other micro-batches, and each of their gradients is rounded to bf16 once (2⁻⁹ relative); split layers
    # round their partial sums. The loss averages that out.
    for a, b in zip(halves[level], metrics(tmp_path)):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-2)


def test_small_updates_reach_bf16_weights_through_their_master_copies() -> None:
    step = step_of(Given, lambda groups: torch.optim.Adam(groups, lr=6e-4), precision=Precision("O2", torch.bfloat16))
    for number in range(100):
        step(number, [rows([1.0])])
    assert weight(step) == pytest.approx([0.94], abs=1e-3)
    model = step.distributed.model.weight.detach()
    assert model.dtype == torch.bfloat16 and float(model[0]) == pytest.approx(0.94, abs=4e-3)
    assert {v.dtype for v in step.optimizer.state[step.distributed.store.entries[0].tensor].values()} == {torch.float32}


def test_clipping_sees_gradients_without_the_loss_scale() -> None:
    step = step_of(Given, sgd(), precision=O2, scaler=scaler(init_scale=32768.0), clip=1.0)
    step(0, [rows([0.5])])
    assert float(step.grad_norm) == 0.5
    assert weight(step) == [0.5]


def test_an_overflow_halves_the_scale_and_skips() -> None:
    step = step_of(Given, sgd(), precision=O2, scaler=scaler(init_scale=1024.0, growth_interval=2))
    step(0, [rows([100.0])])  # 102,400 exceeds what float16 holds
    assert step.skipped and weight(step) == [1.0] and step.scaler is not None and step.scaler.scale == 512.0
    for number in (1, 2):
        step(number, [rows([0.25])])
        assert not step.skipped
    assert step.scaler.scale == 1024.0 and weight(step) == [0.5]


def test_overflows_at_the_floor_end_the_run() -> None:
    step = step_of(Given, sgd(), precision=O2, scaler=scaler(init_scale=4.0, min_scale=1.0, max_skips_at_floor=3))
    with pytest.raises(NonFiniteError, match=r"overflowed in 3 steps in a row at the smallest loss scale 1\.0"):
        for number in range(20):
            step(number, [rows([float("inf")])])
    assert number == 4 and weight(step) == [1.0]


def overflow_on_rank_0(stage: int) -> tuple[bool, float, list[float]]:
    from dufu.parallel.process import leave, world_size

    layout = ParallelLayout(data=world_size(), zero_stage=stage)
    step = step_of(lambda: Given(4), sgd(), precision=O2, scaler=scaler(init_scale=1024.0), layout=layout)
    step(0, [rows([1e6 if step.distributed.processes.data.rank == 0 else 1.0])])
    assert step.scaler is not None
    answer = (step.skipped, step.scaler.scale, weight(step))
    leave()
    return answer


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_overflow_on_one_rank_skips_on_all(stage: int, ranks: Ranks) -> None:
    for skipped, scale, values in ranks(2, overflow_on_rank_0, stage):
        assert skipped and scale == 512.0 and set(values) == {1.0}


def test_the_loss_scale_is_resumed(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    own = [*SHORT, *amp("O1", "fp16"), "train.amp.init_scale=256", "train.amp.growth_interval=11", "train.train_iter=14"]
    ranks(1, run, str(tmp_path / "whole"), str(text), own)
    ranks(1, run, str(tmp_path / "parts"), str(text), [*own, "train.stop_at_step=8"])
    state = json.loads((tmp_path / "parts" / "checkpoints" / "step_0000008" / "state.json").read_text())
    assert state["scaler"] == {"scale": 256.0, "good_steps": 8, "skips_at_floor": 0}
    ranks(1, again, str(tmp_path / "parts"), [])
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert [r["loss_scale"] for r in metrics(tmp_path / "parts")] == [256.0] * 10 + [512.0] * 4


def poisoned(folder: str, corpus: str, overrides: list[str]) -> str:
    """Train with a weight that stops being a number before step 3 and is mended after it; return the error."""
    from dufu.errors import DufuError
    from dufu.training.hooks import Hook
    from dufu.training.run import train
    from tests.small import TINY

    class Poison(Hook):
        def before_step(self, trainer: Any) -> None:
            if trainer.step == 2:
                self.tensor = trainer.train_step.distributed.store.entries[0].tensor.data
                self.kept = self.tensor.clone()
                self.tensor.fill_(float("nan"))

        def after_step(self, trainer: Any) -> None:
            if trainer.step == 3:
                self.tensor.copy_(self.kept)

    try:
        train("gpt2_tiny", [*TINY, f"train.output_dir={folder}", *overrides], data=[corpus], hooks=[Poison()])
    except DufuError as error:
        return str(error)
    return ""


def test_a_loss_that_is_no_number_is_shown_and_stops_the_run(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    own = ["dataloader.split=[1.0]", "train.train_iter=5"]
    error = ranks(1, poisoned, str(tmp_path / "stop"), str(text), own)[0]
    assert error.startswith(
        "step 3: the gradient norm is nan; the update was not made. The batch holds samples 16 to 23 of the run"
    )
    assert "train.non_finite=skip" in error
    assert f"stopped by an error: {error}" in (tmp_path / "stop" / "log.txt").read_text()
    last = metrics(tmp_path / "stop")[-1]
    assert last["step"] == 3 and last["loss"] != last["loss"] and last["skipped"] is True
    assert "NaN" in (tmp_path / "stop" / "metrics.jsonl").read_text()

    assert ranks(1, poisoned, str(tmp_path / "skip"), str(text), [*own, "train.non_finite=skip", "train.log_period=5"])[0] == ""
    period = metrics(tmp_path / "skip")[-1]
    assert period["loss"] != period["loss"]  # never smoothed over by the steps around it
    assert (period["skipped"], period["skipped_steps"]) == (True, 1)
    assert "skipped 1" in (tmp_path / "skip" / "log.txt").read_text()


def run_counting(folder: str, text: str, overrides: list[str]) -> int:
    """Train on this rank; return how many pieces of code were compiled."""
    from dufu.compat import compiled_graphs

    before = compiled_graphs()
    run(folder, text, overrides)
    return compiled_graphs() - before


def test_compiled_blocks_give_the_same_numbers_and_all_layers_share_one(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    short = ["dataloader.split=[1.0]", "train.train_iter=2", "model.cfg.hidden_layers=10"]  # more than PyTorch would compile anew
    compiled = {}
    for name in ("false", "true"):
        compiled[name] = ranks(1, run_counting, str(tmp_path / name), str(text), [*short, f"graph.enabled={name}"])[0]
    assert compiled == {"false": 0, "true": 1}
    for a, b in zip(metrics(tmp_path / "false"), metrics(tmp_path / "true")):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)  # fused kernels add in another order
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


def test_compiled_blocks_may_be_split(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    short = ["dataloader.split=[1.0]", "train.train_iter=2", "model.cfg.hidden_layers=2", "train.dist.tensor_parallel_size=2"]
    for name in ("false", "true"):
        ranks(2, run, str(tmp_path / name), str(text), [*short, f"graph.enabled={name}"])
    for a, b in zip(metrics(tmp_path / "false"), metrics(tmp_path / "true")):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
