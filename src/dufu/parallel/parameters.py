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
from dufu.parallel.collectives import Communicator, alone
from dufu.parallel.process import Processes
from dufu.parallel.region import Region, copy_overlap, whole_region


@dataclass(eq=False)
class ParameterInfo:
    """One parameter of the model, under the name it has in every layout.

    Args:
        name: full name.
        parameter: what the model computes with; on the meta device until it is filled.
        shape: shape of the whole.
        region: what part of the whole lies here.
        units: all units that use it.
        divided: whether tensor-parallel processes hold different parts.
        rule: how it begins.
        owner: the module that holds it.
        expert: whether expert-parallel processes hold different parts.
        partial: whether each tensor-parallel process has a part of the gradient's sum, though all hold the same values.
        holders: places in the pipeline whose processes hold it.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    region: Region
    units: tuple[str, ...]
    divided: bool
    rule: Initial | None
    owner: nn.Module
    expert: bool = False
    partial: bool = False
    holders: tuple[int, ...] = (0,)

    @property
    def unit(self) -> str:
        """Return the first unit that uses it."""
        return self.units[0] if self.units else "model"

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
        spread: the other processes that hold it.
        first: whether this process comes first among the tensor-parallel and the pipeline's processes that hold equal values.
    """

    tensor: nn.Parameter
    pieces: list[Piece]
    options: dict[str, Any]
    divided: bool
    unsharded: bool
    spread: Spread
    first: bool = True
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def counted_among_replicas(self) -> bool:
        """Say whether this process comes first among the replicas that hold equal values."""
        return (self.spread.reduce if self.unsharded else self.spread.repeat).rank == 0

    @property
    def counted(self) -> bool:
        """Say whether this process counts the entry, where each element of the model is to be counted once over all."""
        return self.first and self.counted_among_replicas


@dataclass(frozen=True)
class Spread:
    """The processes over which a parameter's gradient is summed, and how ZeRO divides them.

    Args:
        reduce: all that hold the same part of the model.
        shard: among them, those that own a stretch each.
        repeat: among them, those that own the same stretch.
    """

    reduce: Communicator
    shard: Communicator
    repeat: Communicator


def spread_of(info: ParameterInfo, processes: Processes) -> Spread:
    """Return which processes share a parameter."""
    if info.expert:
        return Spread(processes.expert_replicas, processes.expert_replicas, alone("repeat"))
    return Spread(processes.replicas, processes.shard, processes.repeat)


def is_first(info: ParameterInfo, processes: Processes) -> bool:
    """Say whether this process comes first among the tensor-parallel and the pipeline's processes that hold equal values."""
    return (info.divided or processes.tensor.rank == 0) and processes.pipeline.rank == info.holders[0]


@dataclass
class Placement:
    """What laying out found of the model's parameters.

    Args:
        parts: of each divided parameter the whole's shape and the region that lies here.
        tensor: those that the tensor-parallel processes divide.
        expert: those that the expert-parallel processes divide.
        partial: undivided ones of whose gradient each tensor-parallel process has a part.
        stage_owner: of each unit, the place in the pipeline that runs it.
    """

    parts: dict[nn.Parameter, tuple[tuple[int, ...], Region]] = field(default_factory=dict)
    tensor: set[nn.Parameter] = field(default_factory=set)
    expert: set[nn.Parameter] = field(default_factory=set)
    partial: set[nn.Parameter] = field(default_factory=set)
    stage_owner: dict[str, int] = field(default_factory=dict)


def describe(model: nn.Module, units: dict[str, nn.Module], placement: Placement) -> list[ParameterInfo]:
    """Return every parameter of the model once, in the model's order; a shared one under its first name.

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
            whole = tuple(parameter.shape)
            shape, region = placement.parts.get(parameter, (whole, whole_region(whole)))
            names = users.get(parameter, [])
            infos.append(
                ParameterInfo(
                    name=name,
                    parameter=parameter,
                    shape=shape,
                    region=region,
                    units=tuple(names),
                    divided=parameter in placement.tensor,
                    rule=getattr(module, "initial", {}).get(leaf),
                    owner=module,
                    expert=parameter in placement.expert,
                    partial=parameter in placement.partial,
                    holders=tuple(sorted({placement.stage_owner.get(unit, 0) for unit in names})) or (0,),
                )
            )
    return infos


def give_memory(info: ParameterInfo, values: Tensor) -> None:
    """Put values in the place of a parameter on the meta device; the parameter stays the same object wherever it is used."""
    torch.utils.swap_tensors(info.parameter, nn.Parameter(values, requires_grad=info.parameter.requires_grad))


def fill(info: ParameterInfo, seed: int | None, memory: Tensor, region: Region) -> None:
    """Fill flat memory, which holds `region` of a parameter, with its initial weights; what only pads becomes zero.

    Args:
        seed: None = the weights come from elsewhere; until then they are no numbers, so that one that was left out would show.
    """
    memory[region.numel :].zero_()
    if seed is None:
        memory[: region.numel].fill_(float("nan"))
        return
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
