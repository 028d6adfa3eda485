"""What is known of each parameter, and filling this process's part of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dufu.compat import storage_identity
from dufu.errors import DufuError
from dufu.layers.initial import Initial
from dufu.layers.random import stable_hash
from dufu.parallel.region import Region, copy_overlap, whole_region


@dataclass(eq=False)
class ParameterInfo:
    """One parameter of the model, under the name it has in every layout.

    Args:
        name: full name.
        parameter: what the model computes with; on the meta device until it is filled.
        shape: shape of the whole.
        region: what part of the whole lies here.
        unit: name of the chain's unit it belongs to; "shared" when several units use it.
        divided: whether tensor-parallel processes hold different parts.
        rule: how it begins.
        owner: the module that holds it.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    region: Region
    unit: str
    divided: bool
    rule: Initial | None
    owner: nn.Module

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this process's part."""
        return tuple(self.parameter.shape)


@dataclass(eq=False)
class Piece:
    """A stretch of one parameter inside an entry's tensor."""

    info: ParameterInfo
    region: Region  # what lies in the stretch, as part of the whole parameter
    start: int  # first element within the entry's flat tensor
    length: int  # elements of the stretch; those past region.numel only pad


@dataclass(eq=False)
class Entry:
    """A tensor that the optimizer updates: one parameter, or this process's share of several.

    Args:
        tensor: values in the optimizer's precision; its `.grad` is complete after `ParameterStore.finish()`.
        pieces: what it holds.
        options: the optimizer group's settings, without the parameters.
        divided: whether tensor-parallel processes hold different values here.
        unsharded: whether the tensor is one whole local parameter, in its own shape.
    """

    tensor: nn.Parameter
    pieces: list[Piece]
    options: dict[str, Any]
    divided: bool
    unsharded: bool
    state: dict[str, Tensor] = field(default_factory=dict)


def describe(
    model: nn.Module, units: dict[str, nn.Module], placed: dict[nn.Parameter, tuple[tuple[int, ...], Region]]
) -> list[ParameterInfo]:
    """Return every parameter once, in the model's order; a shared one under its first name.

    Raises:
        DufuError: two different parameters share one storage, which no layout could keep equal.
    """
    users: dict[nn.Parameter, list[str]] = {}
    for unit, module in units.items():
        for parameter in module.parameters():
            users.setdefault(parameter, []).append(unit)
    infos: list[ParameterInfo] = []
    storages: dict[int, str] = {}
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or parameter in seen:
                continue
            seen.add(parameter)
            name = f"{prefix}.{leaf}" if prefix else leaf
            storage = storage_identity(parameter)
            if storage in storages:
                raise DufuError(
                    f"{storages[storage]} and {name} are two parameters on one tensor; assign one parameter to both places "
                    f"(model.a.weight = model.b.weight)"
                )
            storages[storage] = name
            shape, region = placed.get(parameter, (tuple(parameter.shape), whole_region(tuple(parameter.shape))))
            owners = users.get(parameter, [])
            infos.append(
                ParameterInfo(
                    name=name,
                    parameter=parameter,
                    shape=shape,
                    region=region,
                    unit=owners[0] if len(owners) == 1 else "shared",
                    divided=parameter in placed,
                    rule=getattr(module, "initial", {}).get(leaf),
                    owner=module,
                )
            )
    return infos


def give_memory(info: ParameterInfo, values: Tensor) -> None:
    """Put values in the place of a parameter on the meta device; the parameter stays the same object wherever it is used."""
    torch.utils.swap_tensors(info.parameter, nn.Parameter(values, requires_grad=info.parameter.requires_grad))


def fill(info: ParameterInfo, seed: int, memory: Tensor, region: Region) -> None:
    """Fill flat memory, which holds `region` of a parameter, with its initial weights; what only pads becomes zero."""
    memory[region.numel :].zero_()
    if info.rule is not None:
        for block, view in region.views(memory):
            info.rule.fill(view, seed, info.name, block.row, block.col)
        return
    whole = _from_reset(info, seed)
    copy_overlap(memory, region, whole.view(-1), whole_region(info.shape))


def _from_reset(info: ParameterInfo, seed: int) -> Tensor:
    """Return the whole parameter as the owner's own `reset_parameters` makes it, from a generator seeded by (seed, name).

    For modules that do not describe their weights, such as a plain torch.nn layer.
    """
    reset = getattr(info.owner, "reset_parameters", None)
    if reset is None:
        raise DufuError(
            f"{info.name}: {type(info.owner).__name__} neither describes its initial weights nor has reset_parameters(); "
            f"derive it from dufu.layers.initial.Described"
        )
    leaf = info.name.rsplit(".", 1)[-1]
    held = dict(info.owner._parameters)
    try:
        for name, parameter in held.items():
            if parameter is not None:
                shape = info.shape if name == leaf else parameter.shape
                info.owner._parameters[name] = nn.Parameter(torch.empty(shape), requires_grad=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stable_hash("reset", seed, info.name) & 0x7FFFFFFFFFFFFFFF)
            with torch.no_grad():
                reset()
        made = info.owner._parameters[leaf]
        assert made is not None
        return made.detach()
    finally:
        info.owner._parameters.update(held)


def buffers_on_meta(model: nn.Module) -> Iterator[str]:
    """Yield the names of buffers that have no values."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            yield name
