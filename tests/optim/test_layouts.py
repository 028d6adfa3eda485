"""Each optimizer trains the same model to the same numbers in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import Ranks
from tests.small import TINY, metrics

# Bias decay stays on, so that flat buffers mix matrices and vectors; no warm-up, so that the first update already moves.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 1e-3, "weight_decay": 0.01},
    "adamw": {"lr": 1e-3, "do_bias_correction": False, "eps": 1e-6},
    "sgd": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "lamb": {"lr": 1e-2},
    "adafactor": {"lr": 1e-2, "relative_step": False, "beta1": 0.5, "weight_decay": 0.01},
}
LAYOUTS = {
    "dp2": [],
    "tp2": ["train.dist.tensor_parallel_size=2"],
    "zero1": ["train.zero_optimization.enabled=true"],
    "zero3": ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"],
}


def run(
    folder: str, corpus: str, optimizer: str, overrides: list[str], resume: bool = False, fault: str | None = None
) -> list[dict[str, int]]:
    """Train `gpt2_tiny` with an optimizer; return the bytes sent over (data, tensor)."""
    from contextlib import nullcontext

    from dufu.config import LazyCall
    from dufu.config.lazy import as_config
    from dufu.parallel import faults
    from dufu.training.effective import read_config
    from dufu.training.hooks import Hook
    from dufu.training.run import train

    class Witness(Hook):
        sent: list[dict[str, int]] = []  # noqa: RUF012

        def after_step(self, trainer: Any) -> None:
            processes = trainer.train_step.distributed.processes
            self.sent = [dict(c.sent) for c in (processes.data, processes.tensor)]

    config = read_config("gpt2_tiny")
    config.optim = LazyCall(optimizer)(
        params=LazyCall("dufu.optim.get_default_optimizer_params")(weight_decay_norm=0.0), **OPTIMIZERS[optimizer]
    )
    config.train.scheduler = LazyCall("linear")()
    witness = Witness()
    own = [*TINY, f"train.output_dir={folder}", "train.warmup_ratio=0", "train.num_accumulation_steps=2"]
    with faults.inject(fault) if fault else nullcontext():
        train(as_config(config), [*own, *overrides], data=[corpus], resume=resume, hooks=[witness])
    return witness.sent


def distance(a: list[dict[str, Any]], b: list[dict[str, Any]], key: str) -> float:
    assert [r["step"] for r in a] == [r["step"] for r in b] and a
    return max(abs(x[key] - y[key]) / abs(x[key]) for x, y in zip(a, b))


@pytest.fixture(scope="module")
def single(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for name in OPTIMIZERS:
        folder = tmp_path_factory.mktemp(name) / "run"
        ranks(1, run, str(folder), str(corpus), name, [])
        found[name] = metrics(folder)
    return found


def test_the_optimizers_differ_and_learn(single: dict[str, list[dict[str, Any]]]) -> None:
    last = {name: records[-1]["loss"] for name, records in single.items()}
    assert len(set(last.values())) == len(last)
    assert all(records[-1]["loss"] < records[0]["loss"] for records in single.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_equal_one_process(
    optimizer: str, layout: str, single: dict[str, Any], ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    sent = ranks(2, run, str(tmp_path / "run"), str(corpus), optimizer, LAYOUTS[layout])
    mine = metrics(tmp_path / "run")
    # fp32 sums in another order: about 1e-7 a step, growing slowly
    assert distance(single[optimizer], mine, "loss") < 1e-5
    assert distance(single[optimizer], mine, "grad_norm") < 1e-4
    assert all(sent[0][1 if layout == "tp2" else 0] for sent in [sent])


@pytest.mark.parametrize(("size", "layout"), [(3, "zero3"), (4, "zero3xtp2")])
@pytest.mark.parametrize("optimizer", ["lamb", "adafactor"])
def test_whole_parameters_over_stretches_that_cut_rows(
    optimizer: str, size: int, layout: str, single: dict[str, Any], ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    """Three processes cut parameters in the middle of a row; with tensor parallelism replicated ones must count once."""
    overrides = [*LAYOUTS["zero3"], *(LAYOUTS["tp2"] if "tp2" in layout else [])]
    ranks(size, run, str(tmp_path / "run"), str(corpus), optimizer, overrides)
    assert distance(single[optimizer], metrics(tmp_path / "run"), "loss") < 1e-5


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor"])
def test_without_the_sum_over_processes_the_curve_differs(
    optimizer: str, single: dict[str, Any], ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    ranks(2, run, str(tmp_path / "run"), str(corpus), optimizer, LAYOUTS["zero3"], False, "optim.skip_sum")
    assert distance(single[optimizer], metrics(tmp_path / "run"), "loss") > 1e-5


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor"])
def test_resumed_runs_go_on_as_if_never_stopped(
    optimizer: str, single: dict[str, Any], ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    """Two steps on zero3, one more there, then one process, then tensor-parallel; and the same stop on one process alone."""
    zero3, tp2 = LAYOUTS["zero3"], LAYOUTS["tp2"]
    folder = str(tmp_path / "run")
    for size, layout, stop in ((2, zero3, 2), (2, zero3, 3), (1, [], 4), (2, tp2, 6)):
        ranks(size, run, folder, str(corpus), optimizer, [*layout, f"train.stop_at_step={stop}"], stop > 2)
    assert distance(single[optimizer], metrics(tmp_path / "run"), "loss") < 1e-5
    ranks(2, run, str(tmp_path / "whole"), str(corpus), optimizer, zero3)
    for layout, size, whole in (([], 1, single[optimizer]), (zero3, 2, metrics(tmp_path / "whole"))):
        parts = str(tmp_path / f"parts{size}")
        ranks(size, run, parts, str(corpus), optimizer, [*layout, "train.stop_at_step=3"])
        ranks(size, run, parts, str(corpus), optimizer, layout, True)
        assert metrics(parts) == whole  # to the last bit
