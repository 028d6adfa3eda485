"""Training a mixture of experts gives the numbers of one process in any layout, with dropout, a capacity and accumulation on."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dufu.config.schema import defaults
from dufu.parallel import faults
from tests.pool import Ranks
from tests.small import TINY, metrics

EP2, TP2, CP2, PP2 = (f"train.dist.{name}_parallel_size=2" for name in ("expert", "tensor", "context", "pipeline"))
SP2, ZERO = "train.dist.sequence_parallel=true", "train.zero_optimization.enabled=true"
STAGE = "train.zero_optimization.stage={}"
MIXED = [
    "model.cfg.num_experts=4", "model.cfg.moe_ffn_hidden_size=32", "model.cfg.moe_capacity_factor=1.0",
    "model.cfg.moe_balance_weight=0.1", "model.cfg.moe_z_weight=0.01",
]  # fmt: skip
LAYOUTS = {
    "dp2": (2, []),
    "ep2": (2, [EP2]),
    "dp4xep2": (4, [EP2]),
    "ep4": (4, ["train.dist.expert_parallel_size=4"]),
    "dp6xep2": (6, [EP2]),  # eight samples over six processes: some take part without a sample of their own
    "ep2xtp2": (4, [EP2, TP2]),
    "ep2xsp2": (4, [EP2, TP2, SP2]),
    "cp2xep2": (2, [CP2, EP2]),
    "pp2": (2, [PP2]),
    "pp2xep2": (4, [PP2, EP2]),
    "zero1xep2": (4, [EP2, ZERO, STAGE.format(1)]),
    "zero2xep2": (4, [EP2, ZERO, STAGE.format(2)]),
    "zero3xep2": (4, [EP2, ZERO, STAGE.format(3)]),
    "zero3xep2 alone": (2, [EP2, ZERO, STAGE.format(3)]),
    "ep2 recomputed": (2, [EP2, "train.activation_checkpoint.enabled=true"]),
    "dp3": (3, []),
}  # fmt: skip
FAULTS = [
    ("ep2", "expert.skip_gradient"),
    ("ep2", "expert.wrong_order"),
    ("ep2", "data.skip_reduce"),
    ("cp2xep2", "expert.own_usage"),
    ("ep2xtp2", "tensor.skip_enter"),
]


def run(folder: str, corpus: str, overrides: list[str], fault: str | None = None, resume: bool = False) -> dict[str, Any]:
    """Train on this rank; return what shows that the work was divided."""
    from dufu.training.hooks import Hook
    from dufu.training.run import train

    class Witness(Hook):
        seen: dict[str, Any] = {}  # noqa: RUF012

        def after_step(self, trainer: Any) -> None:
            distributed = trainer.train_step.distributed
            infos = {info.name: info for info in distributed.infos}
            self.seen = {
                "experts": infos["layers.1.block.mlp.experts.contract"].local_shape,
                "held": sum(e.tensor.numel() for e in distributed.store.entries),
                "all_to_all": distributed.processes.expert.sent["all_to_all"],
            }

    witness = Witness()
    with faults.inject(fault) if fault else nullcontext():
        train(
            "llama_moe_tiny",
            [*TINY, *MIXED, f"train.output_dir={folder}", "train.num_accumulation_steps=2", *overrides],
            data=[corpus],
            hooks=[witness],
            resume=resume,
        )
    return witness.seen


@pytest.fixture(scope="module")
def one(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one") / "run"
    seen = ranks(1, run, str(folder), str(corpus), [])[0]
    return metrics(folder), seen


def distance(a: list[dict[str, Any]], b: list[dict[str, Any]], key: str) -> float:
    assert [r["step"] for r in a] == [r["step"] for r in b]
    found = [abs(x[key] - y[key]) / abs(x[key]) for x, y in zip(a, b)]
    return max(found) if all(map(math.isfinite, found)) else math.inf


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_norms_equal_one_process(name: str, one: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    size, overrides = LAYOUTS[name]
    seen = ranks(size, run, str(tmp_path / "run"), str(corpus), overrides)
    mine = metrics(tmp_path / "run")
    # fp32 sums in another order: about 1e-7 a step, growing slowly; a choice between experts of nearly equal score may turn, but none does
    for key in ("loss", "lm_loss", "balance_loss", "z_loss"):
        assert distance(one[0], mine, key) < 1e-5, key
    assert distance(one[0], mine, "grad_norm") < 1e-4
    assert [r["tokens"] for r in mine] == [r["tokens"] for r in one[0]]
    experts = 4 if "ep4" in name else 2 if "ep2" in name else 1
    whole = one[1]["experts"]
    for rank in seen:
        if "zero3" not in name and "pp2" not in name:
            assert rank["experts"] == (whole[0] // experts, whole[1] // (2 if "tp2" in name or "sp2" in name else 1), whole[2])
        assert (rank["all_to_all"] > 0) == (experts > 1) or "pp2" in name
        assert rank["held"] < one[1]["held"] or experts == 1
    if experts > 1:
        assert sum(rank["all_to_all"] for rank in seen) > 0


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_seeded_fault_turns_parity_red(name: str, fault: str, one: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    size, overrides = LAYOUTS[name]
    ranks(size, run, str(tmp_path / "run"), str(corpus), overrides, fault)
    mine = metrics(tmp_path / "run")
    assert distance(one[0], mine, "loss") > 1e-5 or distance(one[0], mine, "grad_norm") > 1e-4


def texts(folder: str, overrides: list[str]) -> list[str]:
    from dufu.generation import TextGenerationPipeline

    found = TextGenerationPipeline(folder, overrides)(["def", "the class of", "a"], max_new_tokens=8, temperature=0.7, seed=3)
    return [each.text for each in found]


def test_another_layout_continues_the_same_curve_and_generates_the_same_text(
    one: Any, ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    stages = [("ep2xtp2", 2), ("zero3xep2", 3), ("dp3", 4), ("pp2xep2", 5), ("ep4", 6)]
    for number, (name, stop) in enumerate(stages):
        size, overrides = LAYOUTS[name]
        given = [*defaults("train.dist"), *defaults("train.zero_optimization"), *overrides, f"train.stop_at_step={stop}"]
        ranks(size, run, str(folder), str(corpus), given, None, number > 0)
    mine = metrics(folder)
    assert distance(one[0], mine, "loss") < 1e-5 and distance(one[0], mine, "balance_loss") < 1e-5
    plain = [*defaults("train.dist"), *defaults("train.zero_optimization")]
    (alone,) = ranks(1, texts, str(folder), plain)
    assert all(found == alone for found in ranks(2, texts, str(folder), [*plain, EP2]))
    assert all(found == alone for found in ranks(2, texts, str(folder), plain))


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor"])
def test_optimizers_that_need_whole_parameters_find_them(optimizer: str, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    chosen = [f"optim={optimizer}", "train.train_iter=4"]
    ranks(1, run, str(tmp_path / "one"), str(corpus), chosen)
    one = metrics(tmp_path / "one")
    for name in ("ep2xtp2", "zero3xep2"):
        size, overrides = LAYOUTS[name]
        ranks(size, run, str(tmp_path / name), str(corpus), [*chosen, *overrides])
        assert distance(one, metrics(tmp_path / name), "loss") < 1e-5
        assert distance(one, metrics(tmp_path / name), "grad_norm") < 1e-4


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "zbv"])
def test_routing_losses_pass_through_every_pipeline(schedule: str, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    deep = ["model.cfg.hidden_layers=4", "train.train_iter=3", "train.num_accumulation_steps=4"]
    ranks(1, run, str(tmp_path / "one"), str(corpus), deep)
    ranks(2, run, str(tmp_path / "pp2"), str(corpus), [*deep, PP2, f"train.dist.pipeline_schedule={schedule}"])
    one, mine = metrics(tmp_path / "one"), metrics(tmp_path / "pp2")
    for key in ("loss", "balance_loss", "z_loss"):
        assert distance(one, mine, key) < 1e-5
    assert distance(one, mine, "grad_norm") < 1e-4
