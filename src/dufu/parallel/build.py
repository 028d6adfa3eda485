"""Lay a model out over the processes: one function, in a fixed order, from outside the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dufu.errors import DufuError
from dufu.parallel.layout import check_model
from dufu.parallel.parameters import ParameterInfo, buffers_on_meta, describe
from dufu.parallel.process import Processes
from dufu.parallel.recompute import recompute_units
from dufu.parallel.shard import ShardedParameters
from dufu.parallel.store import ParameterStore, WholeParameters
from dufu.parallel.tensor import split_model

Groups = list[dict[str, Any]]


@dataclass
class Distributed:
    """A model laid out over the processes."""

    model: Any  # a ChainModel, or any module with the same `objectives`, `counts` and call
    infos: list[ParameterInfo]
    store: ParameterStore
    groups: Groups  # optimizer groups over the store's entries
    processes: Processes


def distribute(
    make: Callable[[], nn.Module],
    processes: Processes,
    make_groups: Callable[[nn.Module], Groups],
    *,
    seed: int,
    compute_dtype: torch.dtype = torch.float32,
    master: bool = False,
    recompute: str | None = None,
    compile_units: bool = False,
) -> Distributed:
    """Describe the model on the meta device, split it, and make only this process's part of the weights.

    The order: check → split layers (tensor) → group parameters → place and fill weights (data, ZeRO) → recompute → compile.

    Args:
        make: builds the model; called on the meta device.
        processes: this process among the others.
        make_groups: the optimizer groups of a model, by its parameters.
        seed: weights are a function of (seed, name, row, column).
        compute_dtype: type of the model's weights.
        master: whether the optimizer updates float32 copies of half-precision weights.
        recompute: None, "full" or "selective".
        compile_units: compile each unit.

    Raises:
        LayoutError: a layer does not divide over the layout.
    """
    layout = processes.layout
    with torch.device("meta"):
        model = make()
    check_model(model, layout)
    placed = split_model(model, processes.tensor)
    units = chain_units(model)
    infos = describe(model, units, placed)
    lost = list(buffers_on_meta(model))
    if lost:
        raise DufuError(f"{lost[0]}: a buffer made on the meta device has no values; compute it in forward, or on the CPU")
    options = {p: {k: v for k, v in group.items() if k != "params"} for group in make_groups(model) for p in group["params"]}
    left_out = [i.name for i in infos if i.parameter.requires_grad and options and i.parameter not in options]
    if left_out:
        raise DufuError(f"optim.params: no group holds {', '.join(left_out[:5])}; give them a group, or freeze them")
    store: ParameterStore
    if layout.zero_stage and layout.data > 1:
        store = ShardedParameters(
            infos, options, processes.data, processes.device, compute_dtype, master, seed, layout.zero_stage, units
        )
    else:
        store = WholeParameters(infos, options, processes.data, processes.device, compute_dtype, master, seed)
    if recompute is not None:
        recompute_units(units, recompute)
    if compile_units:
        for unit in list(units.values())[1:-1]:
            unit.forward = torch.compile(unit.forward)  # type: ignore[method-assign]
    return Distributed(model, infos, store, _entry_groups(store), processes)


def chain_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's units; a plain module is one unit."""
    units = getattr(model, "units", None)
    return units() if callable(units) else {"model": model}


def _entry_groups(store: ParameterStore) -> Groups:
    groups: dict[str, dict[str, Any]] = {}
    for entry in store.entries:
        key = repr(sorted(entry.options.items()))
        groups.setdefault(key, {"params": [], **entry.options})["params"].append(entry.tensor)
    return list(groups.values())
