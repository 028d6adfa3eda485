"""`dufu.parallelize` of an unmodified transformers model: a user's own loop gives the numbers of one process."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from dufu import distributed
from dufu.errors import DufuError, LayoutError
from dufu.parallel import faults
from tests.models.outside_models import MODELS, batch_of, make
from tests.pool import Ranks

ALL = os.environ.get("DUFU_MODELS") == "all"
QUICK = {
    "LlamaForCausalLM": ["dp2", "tp2", "zero3:recompute"],
    "BertForMaskedLM": ["tp2", "zero1"],
    "GPT2LMHeadModel": ["tp2", "zero2"],
    "Qwen3ForCausalLM": ["tp2"],
    "OPTForCausalLM": ["tp2"],
    "T5ForConditionalGeneration": ["tp2"],
    "ViTForImageClassification": ["tp2"],
}
EVERYTHING = {
    name: ["dp2", "tp2", "zero1", "zero2", "zero3", "dp2xtp2", *([] if name.startswith("T5") else ["zero3:recompute"])]
    for name in MODELS
}
CASES = [(name, layout) for name, layouts in (EVERYTHING if ALL else QUICK).items() for layout in layouts]


def loop(name: str, layout: str, micro: int = 1, fault: str | None = None) -> dict[str, Any]:
    """Three updates as a user writes them, dropout on; each process draws other weights, and those of process 0 count."""
    model = make(name, seed=distributed.rank())
    model.train()
    distributed.parallelize(model, layout)
    replicas = int(layout[2]) if layout.startswith("dp") else 2 if layout.startswith("zero") else 1
    place = distributed.rank() // (distributed.world_size() // replicas)
    sharded = layout.startswith("zero")
    adamw: Any = torch.optim.AdamW
    optimizer = distributed.optimizer(model, adamw, lr=0.01) if sharded else adamw(model.parameters(), lr=0.01)
    batch = {key: value.chunk(replicas)[place] for key, value in batch_of(name).items()}
    losses = []
    with faults.inject(fault) if fault else nullcontext():
        for _ in range(3):
            for number in range(micro):
                part = {key: value.chunk(micro)[number] for key, value in batch.items()}
                loss = model(**part).loss / micro
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return {"losses": losses, "held": held, "class": type(model).__name__}


def mean_losses(parts: list[dict[str, Any]]) -> list[float]:
    return [sum(values) / len(parts) for values in zip(*(part["losses"] for part in parts))]


@pytest.fixture(scope="module")
def one(ranks: Ranks) -> Any:
    known: dict[str, dict[str, Any]] = {}

    def run(name: str) -> dict[str, Any]:
        if name not in known:
            known[name] = ranks(1, loop, name, "one")[0]
        return known[name]

    return run


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_loop_of_ones_own_equals_one_process(name: str, layout: str, one: Any, ranks: Ranks) -> None:
    whole = one(name)
    parts = ranks(4 if layout == "dp2xtp2" else 2, loop, name, layout)
    assert mean_losses(parts) == pytest.approx(
        whole["losses"], rel=2e-5
    )  # fp32 sums in another order, through three updates of Adam
    for part in parts:
        assert part["class"] == name  # the user's model, not a wrapper
        if "zero" in layout:
            assert part["held"] <= 0.51 * whole["held"]
        elif "tp" in layout:
            assert part["held"] < 0.9 * whole["held"]


@pytest.mark.parametrize(("layout", "fault"), [("dp2", "data.skip_reduce"), ("tp2", "tensor.skip_enter"), ("zero3", "shard.scale")])
def test_a_seeded_fault_turns_it_red(layout: str, fault: str, one: Any, ranks: Ranks) -> None:
    # Adam forgives a scale, so that only the half of it that its epsilon keeps is left
    far = 1e-6 if fault == "shard.scale" else 2e-5
    assert mean_losses(ranks(2, loop, "LlamaForCausalLM", layout, 1, fault)) != pytest.approx(
        one("LlamaForCausalLM")["losses"], rel=far
    )


def test_gradients_of_several_backwards_are_averaged_once(ranks: Ranks) -> None:
    name = "LlamaForCausalLM"
    whole = ranks(1, accumulate, name, "one")[0]
    for layout in ("dp2", "zero1", "zero2", "zero3"):
        for part in ranks(2, accumulate, name, layout):
            assert part == pytest.approx(whole, rel=1e-5)


def accumulate(name: str, layout: str) -> list[float]:
    """Two backwards, then a step of SGD; return the losses in evaluation mode before and after."""
    model = make(name)
    distributed.parallelize(model, layout)
    model.eval()
    optimizer = distributed.optimizer(model, torch.optim.SGD, lr=0.3)
    size, place = (1, 0) if layout == "one" else (2, distributed.rank())
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(model(**batch_of(name)).loss.item())
        for seed in range(2):
            batch = {key: value.roll(seed, 1).chunk(size)[place] for key, value in batch_of(name).items()}
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def refused(name: str, layout: str, **changes: Any) -> str:
    try:
        model = make(name, **changes)
        distributed.parallelize(model, layout)
        if layout.startswith("zero"):
            torch.optim.SGD(model.parameters(), 0.1).step()
    except DufuError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("name", "layout", "changes", "said"),
    [
        ("LlamaForCausalLM", "pp2", {}, "by dp, tp and zero, not by pp; a recipe with dufu.train"),
        ("LlamaForCausalLM", "tp2", {"num_key_value_heads": 1}, "1 key-value heads do not divide over tensor_parallel_size=2; the nearest size"),
        ("LlamaForCausalLM", "tp2", {"intermediate_size": 47}, "47 does not divide over tensor_parallel_size=2; the nearest length is 48"),
        ("LlamaForCausalLM", "tp2:O1", {}, "is a setting of dufu.train"),
        ("LlamaForCausalLM", "zero3", {}, r"which ZeRO shards; make it with dufu.distributed.optimizer\(model, SGD"),
        ("OPTForCausalLM", "dp2", {"dropout": 0.1}, "calls PyTorch's dropout as a function with dropout=0.1"),
        ("OPTForCausalLM", "dp2", {"layerdrop": 0.1}, "layerdrop=0.1 leaves out layers"),
        ("T5ForConditionalGeneration", "zero3:recompute", {}, "has no list of blocks to recompute"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(name: str, layout: str, changes: dict[str, Any], said: str, ranks: Ranks) -> None:
    import re

    for answer in ranks(2, refused_with, name, layout, changes):
        assert re.search(said, answer), answer


def refused_with(name: str, layout: str, changes: dict[str, Any]) -> str:
    return refused(name, layout, **changes)


def test_another_number_of_processes_is_an_error_that_names_both() -> None:
    with pytest.raises(LayoutError, match=r'layout "dp2xtp2" is of 4 processes, but 1 were started: torchrun --nproc_per_node 4'):
        distributed.parallelize(make("LlamaForCausalLM"), "dp2xtp2")
