"""Regions: whatever way two layouts cut a tensor, copying what they share rebuilds it exactly."""

from __future__ import annotations

import random

import pytest
import torch

from dufu.layers.split import SplitRule
from dufu.parallel.region import Region, copy_overlap, split_region, whole_region

SHAPES: list[tuple[tuple[int, ...], list[SplitRule | None]]] = [
    ((12, 8), [None, SplitRule(0), SplitRule(1), SplitRule(0, (4, 4, 4)), SplitRule(1, (4, 4))]),
    ((7, 5), [None, SplitRule(0, padded=True)]),
    ((12,), [None, SplitRule(0), SplitRule(0, (8, 4))]),
    ((8, 4, 3), [None, SplitRule(0), SplitRule(1)]),
    ((6,), [None]),
]


def held(whole: torch.Tensor, rule: SplitRule | None, rank: int, size: int) -> tuple[torch.Tensor, Region]:
    """Return what a rank holds, cut by plain tensor operations, and the region that should describe it."""
    if rule is None:
        return whole.reshape(-1), whole_region(tuple(whole.shape))
    shape, region = split_region(tuple(whole.shape), rule, rank, size)
    if rule.padded:
        rows = shape[0]
        part = torch.full(shape, -1.0)
        real = whole[rank * rows : (rank + 1) * rows]
        part[: len(real)] = real
    else:
        stretches = whole.split(rule.sections or (whole.shape[rule.dim],), rule.dim)
        part = torch.cat([s.chunk(size, rule.dim)[rank] for s in stretches], rule.dim)
    assert tuple(part.shape) == shape
    return part.reshape(-1), region


@pytest.mark.parametrize(("shape", "rules"), SHAPES, ids=str)
def test_any_cut_refills_any_other(shape: tuple[int, ...], rules: list[SplitRule | None]) -> None:
    chance = random.Random(0)
    whole = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
    for source_rule in rules:
        for target_rule in rules:
            sources = []
            for rank in range(1 if source_rule is None else 2):
                memory, region = held(whole, source_rule, rank, 2)
                # ZeRO cuts the local memory anywhere, into unequal and empty stretches too.
                cuts = sorted(chance.choices(range(len(memory) + 1), k=3))
                for start, stop in zip([0, *cuts], [*cuts, len(memory)]):
                    sources.append((memory[start:stop], region.cut(start, stop)))
            for rank in range(1 if target_rule is None else 2):
                expected, region = held(whole, target_rule, rank, 2)
                found = torch.full_like(expected, -1.0)
                copied = sum(copy_overlap(found, region, memory, piece) for memory, piece in sources)
                assert copied == region.numel
                assert torch.equal(found, expected)


def test_regions_survive_json() -> None:
    region = split_region((12, 8), SplitRule(0, (4, 8)), 1, 2)[1].cut(5, 40)
    assert Region.from_json(region.to_json()) == region


def test_an_empty_part_holds_nothing() -> None:
    shape, region = split_region((5, 3), SplitRule(0, padded=True), 3, 4)
    assert shape == (2, 3) and region.numel == 0 and region.cut(0, 6).numel == 0
