"""Comparing two recordings: what differs by how much, and where it begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dufu.errors import DataError
from dufu.parity.recording import Recording, UnitPrint


@dataclass(frozen=True)
class Tolerance:
    """How far two runs may be apart.

    Args:
        loss: relative, of each step's losses and, tenfold, of the gradient norm.
        gradient: ‖difference‖ ≤ gradient · ‖gradient‖ + floor · ‖all gradients‖, for each parameter.
        floor: see `gradient`.
        unit: of a token's print, relative to the root mean square of its unit's.
        reason: why, for the report.
    """

    loss: float
    gradient: float
    floor: float
    unit: float
    reason: str

    def text(self) -> str:
        """Return the tolerance in one line."""
        return (
            f"losses {self.loss:g}, gradient norm {10 * self.loss:g} (relative); "
            f"gradients ‖difference‖ ≤ {self.gradient:g} ‖gradient‖ + {self.floor:g} ‖all gradients‖; units {self.unit:g}: {self.reason}"
        )


TOLERANCES = {
    "O0": Tolerance(1e-6, 1e-5, 1e-7, 5e-5, "fp32, sums in another order"),
    "compiled": Tolerance(2e-6, 2e-5, 2e-7, 1e-4, "fp32, sums in another order, and a compiler's"),
    "O1": Tolerance(2e-4, 2e-2, 4e-4, 5e-2, "matrix products in half precision"),
    "O2": Tolerance(2e-4, 3e-2, 1e-3, 1e-1, "weights and gradients in half precision"),
    "O3": Tolerance(1e-3, 5e-2, 2e-3, 2e-1, "everything in half precision"),
    "half mixture": Tolerance(1e-3, 2e-1, 1e-2, 5e-1, "half precision may send a token to another of two nearly equal experts"),
}


@dataclass(frozen=True)
class Difference:
    """A difference of something named.

    Args:
        name: of what.
        size: relative, as the tolerance measures it.
        excess: how many times the tolerance it is; above 1 it counts.
    """

    name: str
    size: float
    excess: float

    @property
    def counts(self) -> bool:
        """Say whether it is beyond the tolerance; what is no number is."""
        return not self.excess <= 1.0


NONE = Difference("", 0.0, 0.0)


@dataclass
class Comparison:
    """What of a recording differs from the reference.

    Args:
        losses: the worst of all steps; named "loss at step 1".
        begins: the first step at which a loss differs, from 1; 0 = at none.
        norm: the worst gradient norm.
        gradients, parameters: of each parameter, in the model's order.
        forward, backward: of each unit, in the order of the chain.
        problems: what is missing, too much or of another shape.
        units: the chain.
    """

    losses: Difference = NONE
    begins: int = 0
    norm: Difference = NONE
    gradients: list[Difference] = field(default_factory=list)
    parameters: list[Difference] = field(default_factory=list)
    forward: list[Difference] = field(default_factory=list)
    backward: list[Difference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    units: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Say whether nothing is beyond its tolerance."""
        found = (self.losses, self.norm, *self.gradients, *self.parameters, *self.forward, *self.backward)
        return not self.problems and not any(difference.counts for difference in found)

    @property
    def first_unit(self) -> tuple[str, str, Difference] | None:
        """Return where it begins: (unit, direction, difference).

        In the order of the chain the first unit whose output differs; otherwise, from the end, the first whose backward hands on a
        gradient that differs, that of the output of the unit before.
        """
        for difference in self.forward:
            if difference.counts:
                return difference.name, "forward", difference
        for difference in reversed(self.backward):
            if difference.counts:
                following = self.units[self.units.index(difference.name) + 1 :]
                return following[0] if following else "the loss", "backward", difference
        return None

    @property
    def first_parameter(self) -> Difference | None:
        """Return the first parameter whose gradient differs, otherwise the first whose value does."""
        return next((d for d in (*self.gradients, *self.parameters) if d.counts), None)


def worst(differences: Sequence[Difference]) -> Difference:
    """Return the difference that is farthest beyond, or nearest to, its tolerance."""
    return max(differences, key=lambda d: math.inf if math.isnan(d.excess) else d.excess, default=NONE)


def compare(reference: Recording, found: Recording, tolerance: Tolerance) -> Comparison:
    """Compare what both recordings hold.

    Raises:
        DataError: they have nothing in common.
    """
    out = Comparison(units=reference.units)
    shared = min(len(reference.steps), len(found.steps))
    if (
        not shared
        and not reference.gradients.keys() & found.gradients.keys()
        and not reference.forward.keys() & found.forward.keys()
    ):
        raise DataError("the recordings have nothing in common: neither steps, nor parameters or units of the same names")
    losses, norms = _numbers(reference, found, tolerance, shared)
    out.losses, out.norm = worst([d for _, d in losses]), worst(norms)
    out.begins = next((step for step, difference in losses if difference.counts), 0)
    out.gradients = _gradients(reference, found, tolerance, out.problems)
    out.parameters = _parameters(reference, found, tolerance, out.problems)
    for direction in ("forward", "backward"):
        wanted: dict[str, UnitPrint] = getattr(reference, direction)
        mine: dict[str, UnitPrint] = getattr(found, direction)
        chain = [unit for unit in reference.units if unit in wanted and unit in mine]
        setattr(out, direction, [unit_difference(unit, wanted[unit], mine[unit], tolerance) for unit in chain])
    return out


def _relative(value: float, wanted: float) -> float:
    return abs(value - wanted) / max(abs(wanted), 1e-12)


def _numbers(
    reference: Recording, found: Recording, tolerance: Tolerance, shared: int
) -> tuple[list[tuple[int, Difference]], list[Difference]]:
    """Return the difference of each step's losses, with the step, and of each gradient norm."""
    losses: list[tuple[int, Difference]] = []
    norms: list[Difference] = []
    for number in range(shared):
        wanted, mine = reference.steps[number], found.steps[number]
        for name in (n for n in wanted if n in mine):
            limit = tolerance.loss * (10.0 if name == "grad_norm" else 1.0)
            size = _relative(mine[name], wanted[name])
            difference = Difference(f"{name} at step {number + 1}", size, size / limit)
            if name == "grad_norm":
                norms.append(difference)
            else:
                losses.append((number + 1, difference))
    return losses, norms


def total_norm(tensors: dict[str, Tensor]) -> float:
    """Return the norm of all tensors together."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def _common(what: str, reference: dict[str, Tensor], found: dict[str, Tensor], problems: list[str]) -> list[str]:
    """Return the names that both have, in one shape; note what else there is, where both have some."""
    if not reference or not found:
        return []
    missing = [name for name in reference if name not in found]
    extra = [name for name in found if name not in reference]
    for kind, names in (("misses", missing), ("has besides", extra)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            problems.append(f"the recording {kind} {what} of {', '.join(names[:3])}{more}")
    names = []
    for name in (n for n in reference if n in found):
        if reference[name].shape != found[name].shape:
            shapes = f"{list(found[name].shape)} instead of {list(reference[name].shape)}"
            problems.append(f"{what} of {name}: {shapes}")
        else:
            names.append(name)
    return names


def _gradients(reference: Recording, found: Recording, tolerance: Tolerance, problems: list[str]) -> list[Difference]:
    whole, share = total_norm(reference.gradients), tolerance.floor / tolerance.gradient
    out = []
    for name in _common("the gradient", reference.gradients, found.gradients, problems):
        wanted = reference.gradients[name].double()
        size = float((found.gradients[name].double() - wanted).norm()) / max(float(wanted.norm()) + share * whole, 1e-30)
        out.append(Difference(name, size, size / tolerance.gradient))
    return out


def _parameters(reference: Recording, found: Recording, tolerance: Tolerance, problems: list[str]) -> list[Difference]:
    """Compare values after the last step.

    An optimizer that divides by the size of gradients (Adam) moves an element whose gradient is only rounding, such as a key's bias, by
    a full step in a direction of chance. So an element may differ by the relative error that its gradient may have, of the largest step
    that its parameter took, at most twice that step; and every element by rounding.
    """
    whole = total_norm(reference.gradients)
    out = []
    for name in _common("the value", reference.parameters, found.parameters, problems):
        wanted = reference.parameters[name].double()
        difference = float((found.parameters[name].double() - wanted).norm())
        limit = max(1e-6, tolerance.gradient / 10) * float(wanted.norm()) + 1e-12
        step, gradient = reference.update.get(name), reference.gradients.get(name)
        if step is not None and gradient is not None and gradient.numel():
            grad = gradient.double()
            error = (tolerance.gradient * float(grad.norm()) + tolerance.floor * whole) / math.sqrt(grad.numel())
            limit += step * float((error / grad.abs().clamp(min=1e-30)).clamp(max=2.0).norm())
        out.append(Difference(name, difference / max(float(wanted.norm()), 1e-30), difference / limit))
    return out


def unit_difference(unit: str, wanted: UnitPrint, found: UnitPrint, tolerance: Tolerance) -> Difference:
    """Compare each token of a unit on each process with the reference; tokens that nobody has, or nobody should have, are a difference."""
    apart, known = distances(wanted, found)
    seen = torch.unique(found.keys()[known]).numel()
    if not bool(known.all()) or seen < torch.unique(wanted.keys()).numel():
        return Difference(unit, math.inf, math.inf)
    size = float(apart.abs().max()) / root_mean_square(wanted) if apart.numel() else 0.0
    return Difference(unit, size, size / tolerance.unit)


def root_mean_square(found: UnitPrint) -> float:
    """Return the typical size of a unit's numbers."""
    return max(float(found.values.square().mean().sqrt()), 1e-30) if found.values.numel() else 1e-30


def distances(wanted: UnitPrint, found: UnitPrint) -> tuple[Tensor, Tensor]:
    """Return of each of `found`'s tokens the difference from the reference, and whether the reference knows the token; both (N,)."""
    keys, order = wanted.keys().sort()
    mine = found.keys()
    if not keys.numel():
        return torch.zeros_like(found.values), torch.zeros_like(mine, dtype=torch.bool)
    place = torch.searchsorted(keys, mine).clamp(max=keys.numel() - 1)
    known = keys[place] == mine
    return torch.where(known, found.values - wanted.values[order][place], torch.zeros_like(found.values)), known


__all__ = ["TOLERANCES", "Comparison", "Difference", "Tolerance", "compare", "distances", "unit_difference", "worst"]
