"""Whole models and runs whose processes share the positions of every sample: the numbers of one process, dropout on."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dufu.parallel import faults
from dufu.parallel.layout import CONTEXT_METHODS, Pipelining
from tests.parallel.shared_positions import MODELS, distance, one_update
from tests.pool import Ranks
from tests.small import TINY, metrics

UPDATE = 2e-5  # fp32 sums of a few hundred terms in another order, times a gradient of about ten


@pytest.fixture(scope="module")
def updates(ranks: Ranks) -> Any:
    found: dict[Any, Any] = {}

    def one(kind: str, length: int = 12, packed: bool = False, half: bool = False) -> dict[str, Any]:
        key = (kind, length, packed, half)
        if key not in found:
            found[key] = ranks(1, one_update, kind, {}, length, packed, half)[0]
        return found[key]  # type: ignore[no-any-return]

    return one


@pytest.mark.parametrize("method", CONTEXT_METHODS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_what_it_is_on_one_process(kind: str, method: str, updates: Any, ranks: Ranks) -> None:
    """11 positions are padded to 12."""
    for part in ranks(2, one_update, kind, {"context": 2, "context_method": method}, 11):
        assert distance(updates(kind, 11), part) < UPDATE
        assert part["seen"]["stream"][1] == 6 and sum(part["sent"]["context"].values()) > 0


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_packed_documents(method: str, updates: Any, ranks: Ranks) -> None:
    for part in ranks(2, one_update, "gpt2", {"context": 2, "context_method": method}, 11, True):
        assert distance(updates("gpt2", 11, True), part) < UPDATE


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "sequence": True},
        {"tensor": 2, "context_method": "all_to_all"},
        {"tensor": 2, "sequence": True, "context_method": "ring"},
        {"data": 2, "context_method": "ring"},
        {"data": 2, "zero_stage": 3},
        {"zero_stage": 2, "tensor": 2, "sequence": True},
        {"pipeline": 2, "context_method": "ring"},
        {"pipeline": 2, "context_method": "all_to_all"},
    ],
    ids=lambda layout: " ".join(f"{k}={v}" for k, v in layout.items()),
)
def test_beside_other_dimensions(layout: dict[str, Any], updates: Any, ranks: Ranks) -> None:
    for part in ranks(4, one_update, "gpt2", {"context": 2, **layout}, 11):
        assert distance(updates("gpt2", 11), part) < UPDATE


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("mixture", {"tensor": 2, "sequence": True}),
        ("mixture", {"expert": 2}),
        ("mixture", {"data": 2, "expert": 4, "context_method": "ring"}),
        ("llama", {"tensor": 2, "sequence": True, "context_method": "ring"}),
        ("bert", {"tensor": 2, "sequence": True, "context_method": "all_to_all"}),
        ("classifier", {"data": 2, "context_method": "ring"}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(f"{k}={v}" for k, v in value.items()),
)
def test_other_models_beside_other_dimensions(kind: str, layout: dict[str, Any], updates: Any, ranks: Ranks) -> None:
    size = 2 if layout == {"expert": 2} else 4
    for part in ranks(size, one_update, kind, {"context": 2, **layout}, 11):
        assert distance(updates(kind, 11), part) < UPDATE


@pytest.mark.parametrize("method", CONTEXT_METHODS)
@pytest.mark.parametrize("schedule", ["zbv", "interleaved_1f1b"])
def test_in_pipelines_of_several_stages_a_process(schedule: str, method: str, updates: Any, ranks: Ranks) -> None:
    layout = {"context": 2, "context_method": method, "pipeline": 2, "pipelining": Pipelining(schedule, 2)}
    for part in ranks(4, one_update, "gpt2 of four layers", layout, 11):
        assert distance(updates("gpt2 of four layers", 11), part) < UPDATE


@pytest.mark.parametrize("method", CONTEXT_METHODS)
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt2 without attention dropout"])
def test_with_recomputation(kind: str, recompute: str, method: str, updates: Any, ranks: Ranks) -> None:
    run = functools.partial(one_update, recompute=recompute)
    for part in ranks(2, run, kind, {"context": 2, "context_method": method}, 11):
        assert distance(updates(kind, 11), part) < UPDATE


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_with_compiled_units(method: str, updates: Any, ranks: Ranks) -> None:
    run = functools.partial(one_update, compile_units=True)
    for part in ranks(2, run, "gpt2", {"context": 2, "context_method": method}, 11, timeout=300):
        assert distance(updates("gpt2", 11), part) < UPDATE


@pytest.mark.parametrize("method", CONTEXT_METHODS)
@pytest.mark.parametrize("kind", ["gpt2", "gpt2 without attention dropout"])
def test_under_autocast_half_precision_travels(kind: str, method: str, updates: Any, ranks: Ranks) -> None:
    layout = {"context": 2, "context_method": method}
    single = ranks(2, one_update, kind, layout)[0]["sent"]["context"]
    for part in ranks(2, one_update, kind, layout, 12, False, True):
        # bf16 rounds to 2^-9, differently in each layout
        assert distance(updates(kind, 12, False, True), part) < 0.05
        for operation in {"all_gather", "reduce_scatter", "all_to_all"} & set(single):
            assert part["sent"]["context"][operation] == single[operation] // 2
        if method == "ring":  # gradients of what travels round stay float32: of six parts that travel, four halves
            assert part["sent"]["context"]["send"] == single["send"] * 3 // 4


# Whole runs, with evaluation: what a user starts.

RUNS = {
    "cp2": (2, ["train.dist.context_parallel_size=2"]),
    "cp2 all_to_all": (2, ["train.dist.context_parallel_size=2", "train.dist.context_parallel_method=all_to_all"]),
    "cp2 ring": (2, ["train.dist.context_parallel_size=2", "train.dist.context_parallel_method=ring"]),
    "cp2xdp2, zero2": (
        4, ["train.dist.context_parallel_size=2", "train.zero_optimization.enabled=true", "train.zero_optimization.stage=2"]
    ),
    "sp2": (2, ["train.dist.tensor_parallel_size=2", "train.dist.sequence_parallel=true"]),
    "sp2xcp2": (4, ["train.dist.tensor_parallel_size=2", "train.dist.sequence_parallel=true", "train.dist.context_parallel_size=2"]),
}  # fmt: skip


def run(recipe: str, folder: str, corpus: str, overrides: list[str], fault: str | None = None) -> None:
    from dufu.training.run import train

    settings = [
        "train.num_accumulation_steps=2",
        "train.train_iter=4",
        "train.evaluation.eval_period=2",
        "model.cfg.max_seq_length=23",
    ]
    with faults.inject(fault) if fault else nullcontext():
        train(recipe, [*TINY, f"train.output_dir={folder}", *settings, *overrides], data=[corpus])


@pytest.fixture(scope="module")
def alone(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {recipe: tmp_path_factory.mktemp(recipe) / "run" for recipe in ("gpt2_tiny", "bert_tiny")}
    for recipe, folder in folders.items():
        ranks(1, run, recipe, str(folder), str(corpus), [])
    return folders


def differences(one: Path, other: Path) -> dict[str, float]:
    """Return the largest relative difference of each number in two runs' records."""
    found: dict[str, float] = {}
    for split in (None, "valid"):
        ours, theirs = metrics(one, split), metrics(other, split)
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs):
            assert a.keys() == b.keys()
            for key, value in a.items():
                if isinstance(value, (int, float)):
                    found[key] = max(found.get(key, 0.0), abs(value - b[key]) / max(abs(value), 1e-12))
    return found


@pytest.mark.parametrize("recipe", ["gpt2_tiny", "bert_tiny"])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_writes_the_numbers_of_one_process(
    name: str, recipe: str, alone: Any, ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    size, overrides = RUNS[name]
    ranks(size, run, recipe, str(tmp_path / "run"), str(corpus), overrides)
    for key, difference in differences(alone[recipe], tmp_path / "run").items():
        exact = key in ("step", "tokens", "samples") or "accuracy" in key
        assert difference <= (0.0 if exact else 1e-4 if key == "grad_norm" else 1e-5), key  # fp32 sums in another order


@pytest.mark.parametrize(
    ("name", "fault"),
    [("cp2 ring", "context.skip_key_gradient"), ("cp2", "context.dropout_by_rank"), ("sp2", "sequence.skip_scatter")],
)
def test_a_seeded_fault_shows_in_a_run(name: str, fault: str, alone: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    size, overrides = RUNS[name]
    ranks(size, run, "gpt2_tiny", str(tmp_path / "run"), str(corpus), overrides, fault)
    found = differences(alone["gpt2_tiny"], tmp_path / "run")
    assert found["loss"] > 1e-5 or found["grad_norm"] > 1e-4
