"""Lay a model out over the processes: one function, in a fixed order, from outside the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dufu.errors import DufuError
from dufu.parallel.context import split_context
from dufu.parallel.expert import expert_parameters, share_positions, split_experts
from dufu.parallel.layout import check_model
from dufu.parallel.parameters import ParameterInfo, Placement, buffers_on_meta, describe
from dufu.parallel.pipeline import PipelinedChain, Runner, WholeChain, chain_of
from dufu.parallel.process import Processes, subset
from dufu.parallel.recompute import prepare_units
from dufu.parallel.sequence import split_sequence
from dufu.parallel.shard import ShardedParameters
from dufu.parallel.stages import assign_stages
from dufu.parallel.store import ParameterStore, Ties, WholeParameters
from dufu.parallel.tensor import split_model

Groups = list[dict[str, Any]]


@dataclass
class Distributed:
    """A model laid out over the processes."""

    model: Any  # a ChainModel, or any module with the same `objectives`, `counts` and call; parts of other stages have no values
    infos: list[ParameterInfo]  # of the whole model
    store: ParameterStore
    groups: Groups  # optimizer groups over the store's entries
    processes: Processes
    runner: Runner
    stage_of: dict[str, int]  # of each unit


def distribute(
    make: Callable[[], nn.Module],
    processes: Processes,
    make_groups: Callable[[nn.Module], Groups],
    *,
    seed: int | None,
    compute_dtype: torch.dtype = torch.float32,
    master: bool = False,
    recompute: str | None = None,
    compile_units: bool = False,
    units: dict[str, nn.Module] | None = None,
) -> Distributed:
    """Describe the model on the meta device, split it, and make only this process's part of the weights.

    The order: check → assign stages (pipeline) → split experts, layers (tensor), positions (sequence, context) → group parameters →
    place and fill weights (replicas, ZeRO) → recompute → compile.

    Args:
        make: builds the model; called on the meta device.
        processes: this process among the others.
        make_groups: the optimizer groups of a model, by its parameters.
        seed: weights are a function of (seed, name, row, column); None = they will all be loaded.
        compute_dtype: type of the model's weights.
        master: whether the optimizer updates float32 copies of half-precision weights.
        recompute: None, "full" or "selective".
        compile_units: compile each unit.
        units: those of a model that does not name any; what is like a module in its parameters and hooks is enough.

    Raises:
        LayoutError: a layer does not divide over the layout.
    """
    layout = processes.layout
    with torch.device("meta"):
        model = make()
    check_model(model, layout)
    units = units or chain_units(model)
    stage_of = assign_stages(model, units, layout)
    placement = divide(model, units, stage_of, processes)
    infos = describe(model, units, placement)
    lost = list(buffers_on_meta(model))
    if lost:
        raise DufuError(f"{lost[0]}: a buffer made on the meta device has no values; compute it in forward, or on the CPU")
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            module._buffers[leaf] = None if buffer is None else buffer.to(processes.device)
    options = {p: {k: v for k, v in group.items() if k != "params"} for group in make_groups(model) for p in group["params"]}
    left_out = [i.name for i in infos if i.parameter.requires_grad and options and i.parameter not in options]
    if left_out:
        raise DufuError(f"optim.params: no group holds {', '.join(left_out[:5])}; give them a group, or freeze them")
    all_options = [options.get(i.parameter, {}) for i in infos if i.parameter.requires_grad]
    mine = [stage for stage in range(layout.stages) if layout.stage_owner(stage) == processes.pipeline.rank]
    chunks = [[unit for unit, stage in stage_of.items() if stage == each] for each in mine]
    own_units = {unit: module for unit, module in units.items() if stage_of[unit] in mine}
    own = [info for info in infos if processes.pipeline.rank in info.holders]
    ties = _ties(infos, processes)
    arguments = (own, options, processes, compute_dtype, master, seed, chunks, ties)
    store: ParameterStore
    if layout.zero_stage and layout.replicas > 1:
        store = ShardedParameters(*arguments, layout.zero_stage, own_units)
    else:
        store = WholeParameters(*arguments)
    store.shapes = {info.name: info.shape for info in infos}
    between = [unit for unit in list(units)[1:-1] if unit in own_units]
    prepare_units({unit: units[unit] for unit in between}, recompute, compile_units)
    runner: Runner = WholeChain(model, store)
    if layout.pipeline > 1:
        # A graph that ran in part is not run again where weights come and go, or where running it again is dear.
        split_backward = recompute is None and not compile_units and layout.zero_stage < 3 and layout.tensor == 1
        runner = PipelinedChain(model, chain_of(units, stage_of, mine), store, processes, split_backward)
    return Distributed(model, infos, store, _entry_groups(store, all_options), processes, runner, stage_of)


def chain_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's units; a plain module is one unit."""
    units = getattr(model, "units", None)
    return units() if callable(units) else {"model": model}


def divide(model: nn.Module, units: dict[str, nn.Module], stage_of: dict[str, int], processes: Processes) -> Placement:
    """Divide the layers, and say what became of each parameter."""
    layout = processes.layout
    placement = Placement(stage_owner={unit: layout.stage_owner(stage) for unit, stage in stage_of.items()})
    experts = split_experts(model, processes.expert)
    parts = split_model(model, processes.tensor, experts)
    placement.parts, placement.tensor = {**experts, **parts}, set(parts)
    placement.expert = expert_parameters(model) if experts else set()
    if layout.sequence:
        placement.partial = split_sequence(model, units, processes.tensor)
    split_context(model, processes.context, layout.context_method)
    share_positions(model, processes.context)
    return placement


def _ties(infos: list[ParameterInfo], processes: Processes) -> Ties:
    """Return a communicator for each set of the pipeline's processes that hold a parameter together."""
    sets = dict.fromkeys(info.holders for info in infos if len(info.holders) > 1)
    return {holders: subset(processes, "tied", list(holders)) for holders in sets}


def _entry_groups(store: ParameterStore, all_options: list[dict[str, Any]]) -> Groups:
    """Return the optimizer's groups, the same and in the same order on every process, whatever it holds of them."""
    groups: dict[str, dict[str, Any]] = {}
    for options in all_options:
        groups.setdefault(repr(sorted(options.items())), {"params": [], **options})
    for entry in store.entries:
        groups[repr(sorted(entry.options.items()))]["params"].append(entry.tensor)
    return list(groups.values())
