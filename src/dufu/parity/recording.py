"""What a few steps of training compute, in a form that two layouts, or two frameworks, can be compared by.

A recording is a folder:

- `recording.json`: `{"format": 1, "steps": [{"loss": …, "grad_norm": …}, …], "units": ["embedding", …], "facts": {…}}`, one object of
  `steps` for each update; `units` in the order of the chain.
- `gradients.safetensors`: the first step's gradient of each parameter, whole, by the parameter's name, before clipping.
- `parameters.safetensors`: each parameter after the last step.
- `units.safetensors`: for each unit's output and for the gradient of it (`forward.NAME`, `backward.NAME`) a number a token: its dot
  product with `print_vector(width)`, float64; beside it `….samples` and `….positions` say which tokens.

Each part may be missing; only what is there is compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dufu.errors import DataError
from dufu.layers.random import stable_hash
from dufu.parallel.region import Region, copy_overlap, whole_region

FORMAT = 1
_DIRECTIONS = ("forward", "backward")


def print_vector(width: int, name: str = "") -> Tensor:
    """Return the fixed random vector (width,) that a print is a dot product with, float64.

    Args:
        name: of a parameter; "" for units' outputs.
    """
    generator = torch.Generator().manual_seed(stable_hash("print", name, width) & 0x7FFFFFFFFFFFFFFF)
    return torch.randn(width, generator=generator, dtype=torch.float64)


@dataclass
class UnitPrint:
    """A number for each token that a unit saw, on each process that ran it.

    Args:
        samples, positions, ranks: (N,) whose number it is.
        values: (N,) float64.
    """

    samples: Tensor
    positions: Tensor
    ranks: Tensor
    values: Tensor

    @staticmethod
    def joined(parts: Sequence[UnitPrint]) -> UnitPrint:
        """Return several prints of one unit as one."""
        names = ("samples", "positions", "ranks", "values")
        return UnitPrint(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def keys(self) -> Tensor:
        """Return a number (N,) for each token, the same in every recording."""
        return self.samples * (1 << 32) + self.positions


@dataclass(frozen=True)
class Part:
    """A rectangle list of a parameter (or of its gradient), as one process holds it.

    Args:
        name: of the parameter.
        shape: of the whole.
        region: what part it is, as `Region.to_json` writes it.
        values: flat; None where another process hands in the same part.
        print: dot product with the same part of the parameter's print vector.
        rank: of the process.
    """

    name: str
    shape: tuple[int, ...]
    region: tuple[tuple[int, ...], ...]
    values: Tensor | None
    print: float
    rank: int


@dataclass
class RankRecord:
    """What one process saw.

    Args:
        rank: its number.
        steps: losses and gradient norm of each step, the same on every process.
        gradients, parameters: its parts.
        forward, backward: prints of the units that it ran, by unit.
        units: all units of the model, in order.
        update: of each parameter that it holds the largest change of an element over all steps.
        witness: what shows that work was divided: local shapes, bytes sent, units.
    """

    rank: int
    steps: list[dict[str, float]]
    gradients: list[Part]
    parameters: list[Part]
    forward: dict[str, UnitPrint]
    backward: dict[str, UnitPrint]
    units: list[str]
    update: dict[str, float]
    witness: dict[str, Any]


@dataclass
class Recording:
    """What a few steps compute; see the module.

    Args:
        steps: of each update the numbers by name.
        gradients, parameters: whole tensors by name.
        forward, backward: prints by unit.
        units: in the order of the chain.
        update: of each parameter the largest change of an element over all steps.
        facts: versions, config, layout.
        copies: of a run on several processes, every part of every gradient and parameter without its values: equal ones should agree.
        witnesses: of each process what shows that work was divided.
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    forward: dict[str, UnitPrint] = field(default_factory=dict)
    backward: dict[str, UnitPrint] = field(default_factory=dict)
    units: list[str] = field(default_factory=list)
    update: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    copies: dict[str, list[Part]] = field(default_factory=dict)
    witnesses: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write the recording into a folder, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_contiguous(self.gradients), folder / "gradients.safetensors")
        save_file(_contiguous(self.parameters), folder / "parameters.safetensors")
        prints: dict[str, Tensor] = {}
        for direction in _DIRECTIONS:
            for unit, found in getattr(self, direction).items():
                prints[f"{direction}.{unit}"] = found.values
                prints[f"{direction}.{unit}.samples"] = found.samples
                prints[f"{direction}.{unit}.positions"] = found.positions
        save_file(_contiguous(prints), folder / "units.safetensors")
        described = {
            "format": FORMAT, "steps": self.steps, "units": self.units, "update": self.update, "facts": self.facts,
        }  # fmt: skip
        (folder / "recording.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> Recording:
        """Read a recording.

        Raises:
            DataError: there is none, or a file is not what it should be.
        """
        try:
            described = json.loads((folder / "recording.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(f"{folder}: no recording (recording.json is missing); --save-reference {folder} writes one") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{folder}/recording.json: not readable as JSON ({error})") from None
        if not isinstance(described, dict) or described.get("format") != FORMAT:
            raise DataError(f'{folder}/recording.json: not a recording of format {FORMAT}; write {{"format": {FORMAT}, …}}')
        prints = _tensors(folder / "units.safetensors")
        found: dict[str, dict[str, UnitPrint]] = {
            direction: {
                name.partition(".")[2]: _print_of(folder, prints, name)
                for name in prints
                if name.startswith(f"{direction}.") and not name.endswith((".samples", ".positions"))
            }
            for direction in _DIRECTIONS
        }
        return Recording(
            steps=list(described.get("steps", [])),
            gradients=_tensors(folder / "gradients.safetensors"),
            parameters=_tensors(folder / "parameters.safetensors"),
            units=list(described.get("units", [])) or list(found["forward"]),
            update=dict(described.get("update", {})),
            facts=dict(described.get("facts", {})),
            forward=found["forward"],
            backward=found["backward"],
        )


def _print_of(folder: Path, prints: dict[str, Tensor], name: str) -> UnitPrint:
    try:
        samples, positions, values = prints[f"{name}.samples"], prints[f"{name}.positions"], prints[name]
    except KeyError as error:
        raise DataError(f"{folder}/units.safetensors: {name} stands there without {error.args[0]}") from None
    if not samples.shape == positions.shape == values.shape or values.dim() != 1:
        raise DataError(f"{folder}/units.safetensors: {name} and its samples and positions are not of one length")
    return UnitPrint(samples.long(), positions.long(), torch.zeros_like(samples).long(), values.double())


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        return {}
    try:
        found: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise DataError(f"{path}: not a safetensors file ({error})") from None
    return found


def assembled(records: Sequence[RankRecord], facts: dict[str, Any]) -> Recording:
    """Return what the processes of a run saw together.

    Raises:
        AssertionError: they do not hold every element of every parameter exactly once among the parts that count.
    """
    forward: dict[str, list[UnitPrint]] = {}
    backward: dict[str, list[UnitPrint]] = {}
    update: dict[str, float] = {}
    for record in records:
        for unit, found in record.forward.items():
            forward.setdefault(unit, []).append(found)
        for unit, found in record.backward.items():
            backward.setdefault(unit, []).append(found)
        for name, change in record.update.items():
            update[name] = max(change, update.get(name, 0.0))
    first = records[0]
    return Recording(
        steps=first.steps,
        gradients=_whole(part for record in records for part in record.gradients),
        parameters=_whole(part for record in records for part in record.parameters),
        forward={unit: UnitPrint.joined(forward[unit]) for unit in first.units if unit in forward},
        backward={unit: UnitPrint.joined(backward[unit]) for unit in first.units if unit in backward},
        units=first.units,
        update=update,
        facts=facts,
        copies={
            "gradient": [part for record in records for part in record.gradients],
            "parameter": [part for record in records for part in record.parameters],
        },
        witnesses=[record.witness for record in records],
    )


def _whole(parts: Iterable[Part]) -> dict[str, Tensor]:
    """Put the parts that hold values together."""
    found: dict[str, Tensor] = {}
    copied: dict[str, int] = {}
    for part in parts:
        if part.name not in found:
            found[part.name], copied[part.name] = torch.zeros(part.shape), 0
        if part.values is not None:
            whole = found[part.name]
            region = Region.from_json([list(block) for block in part.region])
            copied[part.name] += copy_overlap(whole.view(-1), whole_region(part.shape), part.values.float(), region)
    for name, whole in found.items():
        assert copied[name] == whole.numel(), f"{name}: {copied[name]} of {whole.numel()} elements are counted"
    return found


__all__ = ["Part", "RankRecord", "Recording", "UnitPrint", "assembled", "print_vector"]
