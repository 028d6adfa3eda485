"""Several processes for any PyTorch module: the public face of `dufu.parallel`.

    import dufu

    model = dufu.parallelize(AutoModelForCausalLM.from_pretrained(FOLDER), "dp2xtp2")  # under torchrun --nproc_per_node 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for batch in my_share:
        model(**batch).loss.backward()  # gradients are averaged over the data-parallel processes when this returns
        optimizer.step()
        optimizer.zero_grad()

Training with pipelines, checkpoints and resume is `dufu.train`; this is for a loop of one's own.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import nn

from dufu.config.lazy import as_config
from dufu.config.overrides import apply_overrides
from dufu.config.schema import SECTIONS, to_dict
from dufu.errors import LayoutError
from dufu.parallel.layout import ParallelLayout, check_model, layout_from_config
from dufu.parallel.layout_text import parse_layout
from dufu.parallel.outside import check_outside, is_transformers, lay_out, placed
from dufu.parallel.process import choose_device, global_rank, join, leave, world_size

__all__ = ["is_main_process", "leave", "optimizer", "parallelize", "rank", "world_size"]

Model = TypeVar("Model", bound=nn.Module)


def rank() -> int:
    """Return this process's number, from 0, as the launcher gave it."""
    return global_rank()


def is_main_process() -> bool:
    """Say whether this is process 0, which prints and writes files."""
    return rank() == 0


def parallelize(
    model: Model,
    layout: str | ParallelLayout | int | None = None,
    device: str | None = None,
    *,
    tensor_parallel_size: int | None = None,
    gradients: Literal["mean", "sum"] = "mean",
    seed: int = 0,
) -> Model:
    """Lay a module out over all processes, in place; its user's own loop stays as it is.

    tp: each process keeps its part of every layer that says how it may be split: dufu's own, and those of an unmodified transformers
    model, by transformers' plan or a table of ours. Forward and backward then give on each process what the whole module gives on one, for
    the same input. dp: each process gives a share of the global batch, as large as those of the others; when `loss.backward()` returns,
    every gradient is the mean (or the sum) of theirs, also of several backwards before a step. zero1, zero2, zero3: dp with
    optimizer state, gradients, weights sharded; the optimizer comes from `dufu.distributed.optimizer`, and a transformers model's
    weights are put together block by block. `:recompute` and `:selective` recompute a transformers model's blocks in backward.

    The weights, the whole ones at the call, are those of process 0. A transformers model's dropouts are functions of (seed, number of the
    forward, sample, position, place), the same in every layout whose processes take consecutive shares of a batch. Otherwise
    PyTorch's own dropout draws from each process's generator: seed all of them alike, or give dufu's layers dropout keys.

    Args:
        model: any module; what is not one of dufu's split layers, and has no plan, is repeated on each process.
        layout: a text such as "dp2xtp2" or "zero3:recompute", a ParallelLayout, or the tensor-parallel size; None = all processes by tensor.
        device: such as "cuda"; None = CUDA where there is one, otherwise the CPU.
        tensor_parallel_size: the same as a whole number for `layout`.
        gradients: "mean" of the data-parallel processes' gradients, or "sum".
        seed: of a transformers model's dropouts.

    Returns:
        The model, on the device.

    Raises:
        LayoutError: another number of processes was started, a layer does not divide over them, the message names both numbers, or a layout
            that only `dufu.train` has.
    """
    chosen, recompute = _chosen(layout if tensor_parallel_size is None else tensor_parallel_size)
    if gradients not in ("mean", "sum"):
        raise LayoutError(f'gradients="{gradients}": "mean" or "sum"')
    check_outside(model, chosen)
    if not is_transformers(model):
        check_model(model, chosen)
    processes = join(chosen, choose_device(device))
    atexit.register(leave)
    lay_out(model, chosen, processes, gradients == "mean", seed, recompute)
    return model


def optimizer(model: nn.Module, make: Callable[..., torch.optim.Optimizer], **settings: object) -> torch.optim.Optimizer:
    """Return an optimizer of what this process holds of a module that `parallelize` laid out; needed with ZeRO, right with any layout.

    Args:
        model: the module.
        make: the optimizer's class, one that treats each number by itself where ZeRO shards, such as torch.optim.AdamW.
        settings: its arguments, without the parameters.

    Raises:
        DufuError: the module was not laid out.
    """
    return placed(model).optimizer(make, **settings)


def _chosen(layout: str | ParallelLayout | int | None) -> tuple[ParallelLayout, str | None]:
    """Return the layout, and how blocks are recomputed."""
    world = world_size()
    if isinstance(layout, str):
        text = parse_layout(layout)
        if text.world != world:
            raise LayoutError(
                f'layout "{layout}" is of {text.world} processes, but {world} were started: torchrun --nproc_per_node {text.world}'
            )
        foreign = [o for o in text.options if not o.startswith("train.activation_checkpoint.")]
        if foreign:
            raise LayoutError(
                f'layout "{layout}": {foreign[0]} is a setting of dufu.train; parallelize() takes :recompute and :selective'
            )
        config = as_config({name: to_dict(cls()) for name, cls in SECTIONS.items() if name in ("train", "graph")})
        apply_overrides(config, text.overrides)
        checkpointing = config.train.activation_checkpoint
        return layout_from_config(config.train, world), checkpointing.mode if checkpointing.enabled else None
    if isinstance(layout, ParallelLayout):
        if layout.world != world:
            raise LayoutError(f"layout {layout} is of {layout.world} processes, but {world} were started")
        return layout, None
    size = world if layout is None else layout
    if size != world:
        raise LayoutError(
            f"tensor_parallel_size={size}, but {world} processes were started: parallelize() divides a module over all of them; "
            f'start {size} (torchrun --nproc_per_node {size}), or name the layout, such as "dp2xtp{size}"'
        )
    return ParallelLayout(tensor=size), None
