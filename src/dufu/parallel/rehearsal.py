"""Lay a model out over processes that do not exist, to hear every objection before any is started."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import nn

from dufu.parallel.build import chain_units, divide
from dufu.parallel.collectives import Communicator
from dufu.parallel.layout import ParallelLayout, check_model
from dufu.parallel.process import Processes
from dufu.parallel.stages import assign_stages


def imagined(layout: ParallelLayout) -> Processes:
    """Return the processes of a layout as process 0 would know them, without a connection to the others."""
    names = [item.name for item in fields(Processes) if item.name not in ("layout", "device", "world")]
    dimensions = {name: Communicator(name, None, layout.groups(name)[0], 0) for name in names}
    return Processes(layout, torch.device("cpu"), Communicator("world", None, list(range(layout.world)), 0), **dimensions)


def rehearse(model: nn.Module, layout: ParallelLayout) -> None:
    """Divide a model on the meta device, in place, as `distribute` would.

    Raises:
        LayoutError: the model cannot have the layout; which layer, which numbers.
    """
    check_model(model, layout)
    units = chain_units(model)
    stage_of = assign_stages(model, units, layout)
    divide(model, units, stage_of, imagined(layout))


__all__ = ["imagined", "rehearse"]
