"""Our weights out of foreign tensors: any rectangle, of any kind of rule, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dufu.errors import CheckpointError
from dufu.interchange.export import foreign_tensors
from dufu.interchange.folder import Tensors
from dufu.interchange.source import ForeignWeights
from dufu.layers.split import SplitRule
from dufu.models.names import Rule, Table, by_head, experts, joined, pairwise, same, turned
from dufu.parallel.region import Region, copy_overlap, split_region, whole_region
from tests.models.foreign import State

HEADS, SIZE, WIDTH, INNER = 4, 3, 10, 6
SHAPES = {
    "plain": (7, 5), "vector": (9,), "turned": (8, 6), "fused": (9, 5), "fused_turned": (9, 5), "heads": (3 * HEADS * SIZE, WIDTH),
    "head_bias": (3 * HEADS * SIZE,), "rotary": (HEADS * 4, WIDTH), "gates": (3, 2 * INNER, WIDTH), "backs": (3, INNER, WIDTH),
    "kernel": (4, 3, 2, 2), "words": (11, 4),
}  # fmt: skip
RULES = (
    same("plain", "a"), same("vector", "b"), turned("turned", "c"), joined("fused", [("q", 4), ("k", 2), ("v", 3)]),
    joined("fused_turned", [("qt", 4), ("kt", 5)], transposed=True), by_head("heads", "qkv", HEADS, SIZE), by_head("head_bias", "qkv_b", HEADS, SIZE),
    Rule("rotary", pairwise("rotary", "rot", HEADS, 4, 2)),
    experts("gates", [[f"e{i}.w1", f"e{i}.w3"] for i in range(3)], (INNER, WIDTH)),
    experts("backs", [[f"e{i}.w2"] for i in range(3)], (INNER, WIDTH), transposed=True), same("kernel", "conv"), same("words", "vocab", padded=True),
)  # fmt: skip
TABLE = Table(RULES, ignored=(r"mask\d*",), copies={"tied": "vocab"}, prefix="model.", old_names=((r"\.gamma$", ".weight"),))


@pytest.fixture
def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {name: torch.randn(shape) for name, shape in TABLE.foreign_shapes(SHAPES).items()}
    found["vocab"] = torch.cat((found["vocab"], torch.randn(2, 4)))  # a vocabulary that was rounded up
    return found


def source(state: dict[str, Tensor]) -> ForeignWeights:
    return ForeignWeights(Tensors(Path("state"), [State(state)]), TABLE, SHAPES)


def whole(found: ForeignWeights, name: str) -> Tensor:
    memory = torch.full((whole_region(SHAPES[name]).numel,), float("nan"))
    found.read(name, SHAPES[name], whole_region(SHAPES[name]), memory)
    return memory.view(SHAPES[name])


def test_each_kind_of_rule_by_hand(state: dict[str, Tensor]) -> None:
    found = source(state)
    assert torch.equal(whole(found, "plain"), state["a"])
    assert torch.equal(whole(found, "turned"), state["c"].t())
    assert torch.equal(whole(found, "fused"), torch.cat((state["q"], state["k"], state["v"])))
    assert torch.equal(whole(found, "fused_turned"), torch.cat((state["qt"].t(), state["kt"].t())))
    by_kind = state["qkv"].view(HEADS, 3, SIZE, WIDTH).transpose(0, 1).reshape(-1, WIDTH)
    assert torch.equal(whole(found, "heads"), by_kind)
    assert torch.equal(whole(found, "head_bias"), state["qkv_b"].view(HEADS, 3, SIZE).transpose(0, 1).reshape(-1))
    pairs = state["rot"].view(HEADS, 4, WIDTH)[:, [0, 1, 2, 3]]  # one pair is turned: its halves lie side by side in both
    assert torch.equal(whole(found, "rotary"), pairs.reshape(-1, WIDTH))
    assert torch.equal(whole(found, "gates")[1], torch.cat((state["e1.w1"], state["e1.w3"])))
    assert torch.equal(whole(found, "backs")[2], state["e2.w2"].t())
    assert torch.equal(whole(found, "words"), state["vocab"][:11])


def test_rotary_pairs_side_by_side_come_half_a_head_apart() -> None:
    rule = Rule("x", pairwise("x", "y", 2, 6))
    value = torch.arange(12.0).unsqueeze(1)
    found = ForeignWeights(Tensors(Path("s"), [State({"y": value})]), Table((rule,)), {"x": (12, 1)})
    memory = torch.empty(12)
    found.read("x", (12, 1), whole_region((12, 1)), memory)
    assert memory.tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.mark.parametrize("name", SHAPES)
def test_any_part_is_that_part_of_the_whole(name: str, state: dict[str, Tensor]) -> None:
    """Tensor parallel's parts, cut anywhere by ZeRO."""
    found, shape = source(state), SHAPES[name]
    complete = whole(found, name).reshape(-1)
    rules = [SplitRule(0, padded=True), *([SplitRule(1)] if len(shape) > 1 and shape[1] % 2 == 0 else [])]
    if shape[0] % 3 == 0:
        rules.append(SplitRule(0, (shape[0] // 3,) * 3) if shape[0] // 3 % 2 == 0 else SplitRule(0))
    checked = 0
    for rule in rules:
        for rank in range(2):
            _, region = (
                split_region(shape, rule, rank, 2) if rule.padded or shape[rule.dim] % 2 == 0 else (shape, whole_region(shape))
            )
            for start, stop in ((0, region.numel), (1, region.numel - 1), (region.numel // 3, region.numel // 2 + 1)):
                cut = region.cut(start, max(start, stop))
                memory, expected = torch.full((cut.numel,), float("nan")), torch.full((cut.numel,), float("nan"))
                found.read(name, shape, cut, memory)
                copy_overlap(expected, cut, complete, whole_region(shape))
                assert torch.equal(memory, expected)
                checked += cut.numel
    assert checked > 0


def test_what_is_read_is_written_again_to_the_last_bit(state: dict[str, Tensor]) -> None:
    found = source(state)

    def read(name: str, shape: tuple[int, ...], region: Region, memory: Tensor) -> None:
        found.read(name, shape, region, memory)

    back = dict(foreign_tensors(TABLE, SHAPES, read))
    assert set(back) == set(state)
    assert all(torch.equal(back[name], value if name != "vocab" else value[:11]) for name, value in state.items())


def test_missing_unexpected_and_misshaped_names_are_listed_in_one_line(state: dict[str, Tensor]) -> None:
    del state["k"], state["e1.w3"]
    state.update({"novel": torch.ones(2), "a": torch.ones(7, 6), "mask3": torch.ones(1)})
    with pytest.raises(CheckpointError) as caught:
        source(state).compare(SHAPES)
    said = str(caught.value)
    assert all(part in said for part in ("missing k", "missing e1.w3", "unexpected novel", "a is [7, 6] instead of [7, 5]"))
    assert "mask3" not in said


def test_a_new_head_may_be_missing_but_half_a_tensor_may_not(state: dict[str, Tensor]) -> None:
    del state["a"]
    assert source(state).compare(SHAPES, allow_missing=["plain"]) == {"plain"}
    assert source(state).compare(SHAPES, allow_missing=["a"]) == {"plain"}
    del state["q"]
    with pytest.raises(CheckpointError, match="missing q"):
        source(state).compare(SHAPES, allow_missing=["*"])
    state.update(q=torch.randn(4, 5), novel=torch.ones(1))
    assert source(state).compare(SHAPES, ["plain"], ["nov*"]) == {"plain"}


def test_tied_copies_must_be_equal(state: dict[str, Tensor]) -> None:
    state["tied"] = state["vocab"].clone()
    assert source(state).compare(SHAPES) == set()
    state["tied"][3, 1] += 1e-3
    with pytest.raises(CheckpointError, match="tied differs from vocab"):
        source(state).compare(SHAPES)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused_by_name(bad: float, state: dict[str, Tensor]) -> None:
    state["qkv"][5, 2] = bad
    with pytest.raises(CheckpointError, match="qkv holds values that are no finite numbers"):
        whole(source(state), "heads")


def test_prefixes_and_old_names_are_understood() -> None:
    table = Table((same("w", "model.norm.weight"),), prefix="model.", old_names=((r"\.gamma$", ".weight"),))
    for name in ("model.norm.weight", "norm.weight", "norm.gamma", "model.norm.gamma"):
        tensors = Tensors(Path("s"), [State({name: torch.ones(3)})])
        assert ForeignWeights(tensors, table, {"w": (3,)}).compare({"w": (3,)}) == set()


def test_one_tensor_under_two_names_is_refused() -> None:
    table = Table((same("w", "model.norm.weight"),), prefix="model.", old_names=((r"\.gamma$", ".weight"),))
    both: dict[str, Any] = {"norm.weight": torch.ones(3), "norm.gamma": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="stand for the same one"):
        ForeignWeights(Tensors(Path("s"), [State(both)]), table, {"w": (3,)})
