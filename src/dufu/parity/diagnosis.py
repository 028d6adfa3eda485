"""The likely reason why a layout differs from one process, from what its processes recorded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dufu.parallel.layout import ParallelLayout
from dufu.parallel.region import Region, copy_overlap, whole_region
from dufu.parity.comparison import Comparison, Tolerance, distances, root_mean_square
from dufu.parity.recording import Part, Recording, UnitPrint, print_vector

_NAMES = {"pipeline": "pipeline's", "data": "data-parallel", "context": "context-parallel", "tensor": "tensor-parallel"}


def coordinates(layout: ParallelLayout, rank: int) -> dict[str, int]:
    """Return a rank's place in each dimension of a layout."""
    t, rest = rank % layout.tensor, rank // layout.tensor
    c, rest = rest % layout.context, rest // layout.context
    return {"pipeline": rest // layout.data, "data": rest % layout.data, "context": c, "tensor": t}


def varying(layout: ParallelLayout, ranks: Iterable[int]) -> list[str]:
    """Return the dimensions in which some ranks differ."""
    places = [coordinates(layout, rank) for rank in ranks]
    return [name for name in _NAMES if len({place[name] for place in places}) > 1]


def _of(dimensions: list[str]) -> str:
    return f"the {' and '.join(_NAMES[name] for name in dimensions)} processes"


def explain(
    reference: Recording,
    found: Recording,
    comparison: Comparison,
    layout: ParallelLayout,
    tolerance: Tolerance,
    agrees_without_dropout: bool | None = None,
) -> str:
    """Return the likely reason of a difference, in one sentence.

    Args:
        agrees_without_dropout: whether the same layout equals one process when nothing is dropped; None = not known.
    """
    if agrees_without_dropout:
        return "random state: with dropout switched off it agrees, so the masks depend on the process, not on the token alone"
    first = comparison.first_unit
    if comparison.begins == 1 and (first is None or first[1] == "backward"):
        return (
            "normalisation: the loss differs though no unit's output does; its sum or the count that divides it is not that of the "
            "global batch, or a sample's loss depends on which others are beside it"
        )
    if first is not None:
        _, direction, difference = first
        wanted, mine = getattr(reference, direction)[difference.name], getattr(found, direction)[difference.name]
        return _of_unit(wanted, mine, layout, tolerance, direction, difference.name == reference.units[0])
    if any(d.counts for d in comparison.gradients):
        name = next(d.name for d in comparison.gradients if d.counts)
        return _of_gradient(name, reference, found, layout, tolerance)
    if any(d.counts for d in comparison.parameters):
        name = next(d.name for d in comparison.parameters if d.counts)
        split = _disagreement([p for p in found.copies.get("parameter", []) if p.name == name], layout, 1e-9)
        if split is not None:
            return f"copies of {name} on {_of(split)} went apart: each updates its own"
        return "the gradients agree and the values do not: the optimizer, its state or the learning rate differs"
    if comparison.begins:
        return f"unknown: the losses part at step {comparison.begins}, though all else agrees"
    if comparison.norm.counts:
        return "the gradients agree and their norm does not: elements are counted twice, or not at all"
    return comparison.problems[0] if comparison.problems else "unknown"


def _of_unit(
    wanted: UnitPrint, mine: UnitPrint, layout: ParallelLayout, tolerance: Tolerance, direction: str, is_first: bool
) -> str:
    what = "output" if direction == "forward" else "gradient of the output"
    apart, known = distances(wanted, mine)
    if not bool(known.all()) or torch.unique(mine.keys()).numel() < torch.unique(wanted.keys()).numel():
        return "tokens are missing, or stand there that one process does not have: the batch is divided wrongly"
    limit = tolerance.unit * root_mean_square(wanted)
    split = _ranks_apart(mine, layout, limit)
    if split is not None:
        return f"sum missing: {_of(split)} hold different values for the {what} of one token, which should be summed over them"
    scale = _scale(mine, apart, limit, max(1e-3, 10 * tolerance.unit))
    if scale is not None:
        return f"scale: the {what} is {_fraction(scale)} times what it should be"
    if _permuted(wanted, mine, limit):
        return f"order: the {what} has the right values at other tokens of the sample; rows are permuted"
    wrong = apart.abs() > limit
    if direction == "forward" and is_first and _by_position(mine, wrong):
        good = int(torch.unique(mine.positions[~wrong]).numel())
        return f"positions shifted: the first unit agrees at {good} positions of every sample and at no other"
    holders = sorted({int(rank) for rank in mine.ranks[wrong]})
    every = sorted({int(rank) for rank in mine.ranks})
    where = (
        f" on process{'es' if len(holders) > 1 else ''} {', '.join(map(str, holders))} of {len(every)}" if holders != every else ""
    )
    what_differs = f"{int(wrong.sum())} of {wrong.numel()} tokens differ{where}"
    if layout.world == 1:
        return f"unknown: {what_differs}"
    if direction == "backward":
        return f"sum missing, perhaps: what other processes add to the gradient of a token does not reach it; {what_differs}"
    return f"order, perhaps: keys, heads or rows of other processes are missing or in another order; {what_differs}"


def _ranks_apart(found: UnitPrint, layout: ParallelLayout, limit: float) -> list[str] | None:
    """Return the dimensions of processes that hold one token with different values."""
    keys, inverse = torch.unique(found.keys(), return_inverse=True)
    low = torch.full((keys.numel(),), torch.inf, dtype=torch.float64).scatter_reduce(0, inverse, found.values, "amin")
    high = torch.full((keys.numel(),), -torch.inf, dtype=torch.float64).scatter_reduce(0, inverse, found.values, "amax")
    if not keys.numel() or not float((high - low).max()) > limit:
        return None
    worst = int((high - low).argmax())
    ranks = found.ranks[inverse == worst].tolist()
    return varying(layout, ranks) or None


def _scale(mine: UnitPrint, apart: Tensor, limit: float, least: float) -> float | None:
    right = mine.values - apart
    total = float(right.square().sum())
    factor = float((mine.values * right).sum()) / total if total else 1.0
    rest = float((mine.values - factor * right).abs().max())
    return factor if abs(factor - 1.0) > least and factor != 0.0 and rest <= 10 * limit * max(1.0, abs(factor)) else None


def _fraction(value: float) -> str:
    """Return a factor as n or 1/n where it is one."""
    for number in range(2, 1025):
        if abs(value - number) < 1e-3 * number:
            return str(number)
        if abs(value - 1 / number) < 1e-3 / number:
            return f"1/{number}"
    return f"{value:.6g}"


def _permuted(wanted: UnitPrint, mine: UnitPrint, limit: float) -> bool:
    """Say whether each sample has the right values at other positions."""
    first = (
        mine.ranks == mine.ranks.min()
        if torch.unique(mine.keys()).numel() < mine.ranks.numel()
        else torch.ones_like(mine.ranks).bool()
    )
    for sample in torch.unique(wanted.samples):
        right = wanted.values[wanted.samples == sample].sort().values
        found = mine.values[(mine.samples == sample) & first].sort().values
        if right.shape != found.shape or not float((right - found).abs().max()) <= 10 * limit:
            return False
    return True


def _by_position(found: UnitPrint, wrong: Tensor) -> bool:
    """Say whether a token's position alone decides if it is wrong, some being right."""
    right_at, wrong_at = set(found.positions[~wrong].tolist()), set(found.positions[wrong].tolist())
    return bool(right_at) and len(right_at & wrong_at) <= 0.02 * len(right_at | wrong_at)


def _disagreement(parts: list[Part], layout: ParallelLayout, limit: float) -> list[str] | None:
    """Return the dimensions of processes that hold the same part with different values."""
    same: dict[tuple[tuple[int, ...], ...], list[Part]] = {}
    for part in parts:
        same.setdefault(part.region, []).append(part)
    for copies in same.values():
        prints = [part.print for part in copies]
        if max(prints) - min(prints) > limit:
            least, most = copies[prints.index(min(prints))], copies[prints.index(max(prints))]
            return varying(layout, (least.rank, most.rank)) or None
    return None


def _of_gradient(name: str, reference: Recording, found: Recording, layout: ParallelLayout, tolerance: Tolerance) -> str:
    right, mine = reference.gradients[name].double(), found.gradients[name].double()
    norm = float(right.norm())
    near = min(100 * tolerance.gradient, 1e-2)
    parts = [part for part in found.copies.get("gradient", []) if part.name == name]
    split = _disagreement(parts, layout, 10 * tolerance.gradient * norm)
    if split is not None and "pipeline" in split:
        return f"untied copy: {_of(split)} hold {name} with different gradients, which should be summed over them"
    if split is not None:
        whole = _sums_to_reference(parts, reference.gradients[name], near * norm)
        certain = "; the sum of theirs is the right one" if whole else ""
        return f"sum missing: {_of(split)} have different gradients of {name}{certain}"
    factor = float((mine * right).sum()) / max(norm**2, 1e-60)
    if abs(factor - 1.0) > 1e-3 and factor and float((mine - factor * right).norm()) <= near * abs(factor) * norm:
        return f"scale: the gradient is {_fraction(factor)} times what it should be"
    if right.dim() >= 2:
        for dim, rows in ((0, "rows"), (1, "columns")):
            if _same_when_sorted(right, mine, dim, near * norm):
                return f"order: the {rows} of the gradient of {name} are permuted (heads or rows of a divided matrix)"
    return f"unknown: the gradient of {name} is neither a multiple nor a permutation of the right one; part of it may be missing"


def _sums_to_reference(parts: list[Part], gradient: Tensor, limit: float) -> bool:
    """Say whether the copies of each part add up to the reference."""
    vector = print_vector(gradient.numel(), parts[0].name)
    sums: dict[tuple[tuple[int, ...], ...], float] = {}
    for part in parts:
        sums[part.region] = sums.get(part.region, 0.0) + part.print
    for blocks, total in sums.items():
        region = Region.from_json([list(block) for block in blocks])
        values, own = torch.zeros(region.numel), torch.zeros(region.numel, dtype=torch.float64)
        whole = whole_region(tuple(gradient.shape))
        copy_overlap(values, region, gradient.float().reshape(-1), whole)
        copy_overlap(own, region, vector, whole)
        if abs(float(values.double() @ own) - total) > limit:
            return False
    return True


def _same_when_sorted(right: Tensor, mine: Tensor, dim: int, limit: float) -> bool:
    """Say whether one matrix has the other's rows (dim 0) or columns in another order."""
    one, two = (t.flatten(1) if dim == 0 else t.flatten(1).T for t in (right, mine))
    vector = print_vector(one.shape[1])
    a, b = (one @ vector).sort().values, (two @ vector).sort().values
    return float((a - b).norm()) <= limit


__all__ = ["coordinates", "explain", "varying"]
