"""Several processes for any PyTorch module built from dufu's layers: the public face of `dufu.parallel`.

    from dufu import distributed
    from dufu.layers import Linear

    model = distributed.parallelize(MyModel())  # one process or torchrun --nproc_per_node N: the same numbers

Training with data parallelism, ZeRO, checkpoints and resume is `dufu.train`; this is for a loop of one's own.
"""

from __future__ import annotations

import atexit
from typing import TypeVar

import torch
from torch import nn

from dufu.errors import LayoutError
from dufu.parallel.build import chain_units
from dufu.parallel.layout import ParallelLayout, check_model
from dufu.parallel.parameters import Placement, describe
from dufu.parallel.process import choose_device, global_rank, join, leave, world_size
from dufu.parallel.region import copy_overlap, whole_region
from dufu.parallel.tensor import split_model

__all__ = ["is_main_process", "leave", "parallelize", "rank", "world_size"]

Model = TypeVar("Model", bound=nn.Module)


def rank() -> int:
    """Return this process's number, from 0, as the launcher gave it."""
    return global_rank()


def is_main_process() -> bool:
    """Say whether this is process 0, which prints and writes files."""
    return rank() == 0


def parallelize(model: Model, tensor_parallel_size: int | None = None, device: str | None = None) -> Model:
    """Divide a module over all processes by tensor, in place: each keeps its part of every layer that says how it may be split.

    Forward and backward then give on each process what the whole module gives on one, for the same input. The weights, the whole
    ones at the call, are those of process 0. PyTorch's own dropout draws from each process's generator: seed all of them alike, or
    give dufu's layers dropout keys.

    Args:
        model: any module; what is not one of dufu's split layers is repeated on each process.
        tensor_parallel_size: None = the number of processes, and otherwise to be equal to it.
        device: such as "cuda"; None = CUDA where there is one, otherwise the CPU.

    Returns:
        The model, on the device.

    Raises:
        LayoutError: another number of processes was started, or a layer does not divide over them; the message names both numbers.
    """
    size = world_size() if tensor_parallel_size is None else tensor_parallel_size
    if size != world_size():
        raise LayoutError(
            f"tensor_parallel_size={size}, but {world_size()} processes were started: parallelize() divides a module over all of them; "
            f"start {size} (torchrun --nproc_per_node {size}), or use dufu.train for data parallelism"
        )
    layout = ParallelLayout(tensor=size)
    check_model(model, layout)
    processes = join(layout, choose_device(device))
    atexit.register(leave)
    model.to(processes.device)
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    placed = split_model(model, processes.tensor)
    with torch.no_grad():
        for info in describe(model, chain_units(model), Placement(placed, set(placed))):
            values = whole[info.name].contiguous()
            processes.world.broadcast_(values)
            part = torch.zeros(info.parameter.numel(), dtype=values.dtype, device=values.device)
            copy_overlap(part, info.region, values.view(-1), whole_region(info.shape))
            info.parameter.copy_(part.view(info.local_shape))
    return model
