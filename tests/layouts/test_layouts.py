"""Every layout of the table gives the numbers of one process, and really divides the work."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dufu.parallel.layout import ParallelLayout
from dufu.parallel.layout_text import parse_layout
from dufu.parallel.pool import Pool
from dufu.parity.check import Checker, ConfigSubject
from dufu.parity.comparison import compare
from dufu.parity.diagnosis import explain
from dufu.parity.recording import Recording
from tests.layouts.table import COMPILED, LAYOUTS, QUICK, TECHNIQUES, pairs_met, pairs_wanted, techniques
from tests.pool import Ranks

ALL = os.environ.get("DUFU_LAYOUTS") == "all"
# Four layers of four heads; a length that context and sequence parallelism have to pad.
SMALL = [
    "model.cfg.hidden_layers=4", "model.cfg.hidden_size=16", "model.cfg.ffn_hidden_size=32", "model.cfg.num_attention_heads=4",
    "model.cfg.max_seq_length=14", "train.train_micro_batch_size=null",
]  # fmt: skip
STEPS = 2


def traced(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a job whose compiled units are captured, and run without generated code."""
    real = torch.compile
    torch.compile = functools.partial(real, backend="aot_eager")  # type: ignore[assignment]
    try:
        return function(*arguments)
    finally:
        torch.compile = real  # type: ignore[assignment]
        torch.compiler.reset()


class TracingPool(Pool):
    """The session's pool, whose jobs do not generate code."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
        return self.pool(size, traced, function, *arguments, timeout=timeout)


@pytest.fixture(scope="module")
def checkers(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Checker]]:
    """Return of each model a checker, which keeps one process's runs."""

    @functools.cache
    def of(model: str) -> Checker:
        subject = ConfigSubject(model, SMALL, (), STEPS, tmp_path_factory.mktemp(model))
        subject.prepare([])
        return Checker(subject, TracingPool(ranks.pool))

    yield of


ROWS = [
    pytest.param(
        model, text, id=f"{model}-{text}", marks=() if ALL or (model, text) in QUICK else pytest.mark.skip("make test-layouts")
    )
    for model, text in LAYOUTS
]


@pytest.mark.parametrize(("model", "text"), ROWS)
def test_a_layout_equals_one_process(model: str, text: str, checkers: Callable[[str], Checker]) -> None:
    compare_with_one_process(checkers(model), text)


@pytest.mark.skipif(not ALL, reason="make test-layouts")
@pytest.mark.parametrize(("model", "text"), COMPILED)
def test_a_compiled_layout_equals_one_process(model: str, text: str, checkers: Callable[[str], Checker], ranks: Ranks) -> None:
    checker = Checker(checkers(model).subject, ranks.pool)
    compare_with_one_process(checker, text)


def compare_with_one_process(checker: Checker, text: str) -> None:
    layout, subject = parse_layout(text), checker.subject
    tolerance, parallel = subject.tolerance(layout), subject.parallel_layout(layout)
    reference, found = checker.reference(layout), checker.record(layout)
    comparison = compare(reference, found, tolerance)
    if not comparison.agrees:
        pytest.fail(f"{explain(reference, found, comparison, parallel, tolerance)}\n{comparison}")
    assert set(found.gradients) == set(reference.gradients) and set(found.parameters) == set(reference.parameters)
    assert comparison.forward and comparison.backward and len(found.steps) == STEPS
    shows_divided_work(parallel, reference, found)


def shows_divided_work(layout: ParallelLayout, reference: Recording, found: Recording) -> None:
    """Assert that no process did or held everything, and that each dimension's processes spoke to each other."""
    whole = sum(t.numel() for t in reference.gradients.values())
    assert len(found.witnesses) == layout.world
    unsplit = reference.witnesses[0]["shapes"]
    for witness in found.witnesses:
        kinds: dict[str, set[str]] = {name: set(sent) for name, sent in witness["sent"].items()}
        replicas = set().union(*(kinds.get(name, set()) for name in ("data", "context", "replicas", "shard", "expert_replicas")))
        smaller = {name for name, shape in witness["shapes"].items() if shape != unsplit[name]}
        assert witness["bytes"] > 0
        if layout.tensor > 1:
            assert any("attention.query_key_value.weight" in name for name in smaller)
            assert ({"all_gather", "reduce_scatter"} if layout.sequence else {"all_reduce"}) <= kinds["tensor"]
        if layout.pipeline > 1:
            assert 0 < len(witness["units"]) < len(reference.units) and "send" in kinds["pipeline"]
        if layout.expert > 1:
            assert any("experts" in name or "mlp" in name for name in smaller)
            assert any("all_to_all" in found_kinds for found_kinds in kinds.values())
        if layout.context > 1:
            kind = {"all_gather": "all_gather", "all_to_all": "all_to_all", "ring": "send"}[layout.context_method]
            assert kind in kinds["context"]
        if layout.replicas > 1:
            assert ("reduce_scatter" if layout.zero_stage else "all_reduce") in replicas
        if layout.zero_stage or layout.tensor > 1 or layout.pipeline > 1 or layout.expert > 1:
            assert witness["held"] < whole
    if layout.pipeline > 1:
        assert {unit for witness in found.witnesses for unit in witness["units"]} == set(reference.units)
    shares_tokens(layout, reference, found)


def shares_tokens(layout: ParallelLayout, reference: Recording, found: Recording) -> None:
    """Assert that each process ran about its share of the tokens through a layer."""
    everything = reference.forward["layers.0"].values.numel()
    ways = layout.replicas * (layout.tensor if layout.sequence else 1)
    prints = found.forward["layers.0"]
    for rank in prints.ranks.unique().tolist():
        mine = int((prints.ranks == rank).sum())
        assert mine <= 1.6 * everything / ways if ways > 1 else mine == everything


def test_the_table_covers_every_pair_of_techniques() -> None:
    assert not {tuple(sorted(pair)) for pair in pairs_wanted() - pairs_met()}
    rows = (*LAYOUTS, *COMPILED)
    assert len(rows) >= 60 and len(set(rows)) == len(rows) and set(QUICK) <= set(LAYOUTS)
    assert all(2 <= parse_layout(text).world <= 8 for _, text in rows)


@pytest.mark.parametrize("model", ["gpt2_tiny", "bert_tiny", "gpt2_moe_tiny"])
def test_each_model_meets_every_technique(model: str) -> None:
    met = set().union(*(techniques(text) for name, text in LAYOUTS if name == model))
    assert met >= set(TECHNIQUES) - (set() if "moe" in model else {"ep"})
