"""The optimizer and the schedule of a config, over the entries of a layout."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from dufu.config.instantiate import instantiate
from dufu.config.load import LazyConfig
from dufu.errors import ConfigError, nearest
from dufu.optim import Part, WholeParameterOptimizer
from dufu.parallel import faults
from dufu.parallel.build import Distributed
from dufu.parallel.process import global_rank


def build_optimizer(config: DictConfig, distributed: Distributed) -> tuple[torch.optim.Optimizer, float, float]:
    """Return the optimizer over the store's entries, the largest gradient norm and the norm's type.

    Raises:
        ConfigError: groups disagree about the one global norm, or set what the optimizer does not know.
    """
    groups = distributed.groups
    limits = {(g.pop("clip_grad_max_norm", 0.0), g.pop("clip_grad_norm_type", 2.0)) for g in groups}
    if len(limits) > 1:
        raise ConfigError(f"optim.params: parameter groups have different clip norms {sorted(limits)}; there is one global norm")
    limit, norm_type = limits.pop() if limits else (0.0, 2.0)
    if not groups:
        raise ConfigError("optim.params: no parameter is trained; every one is frozen")
    optimizer: torch.optim.Optimizer = instantiate(config.optim, params=groups)
    for name in sorted({key for group in groups for key in group} - {"params", *optimizer.defaults}):
        raise ConfigError(f"optim.params: {type(optimizer).__name__} has no setting {name}{nearest(name, optimizer.defaults)}")
    if not isinstance(optimizer, WholeParameterOptimizer) and not is_elementwise(optimizer):
        raise ConfigError(
            f"optim._target_={type(optimizer).__name__}: it treats a parameter as a whole, which a layout may cut; take dufu's own "
            f"(adamw, adam, sgd, lamb, adafactor), or let the class declare `elementwise = True` where each element goes its own way"
        )
    bind(optimizer, distributed)
    return optimizer, float(limit), float(norm_type)


# PyTorch's optimizers in which each element of a parameter goes its own way, so that any layout may cut it anywhere.
_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer treats each element by itself: PyTorch's own that do, and what derives from them or declares it."""
    known = tuple(getattr(torch.optim, name) for name in _ELEMENTWISE)
    return isinstance(optimizer, known) or bool(getattr(optimizer, "elementwise", False))


def bind(optimizer: torch.optim.Optimizer, distributed: Distributed) -> None:
    """Tell an optimizer that needs whole parameters where their parts lie and how to sum over processes."""
    if not isinstance(optimizer, WholeParameterOptimizer):
        return
    store, processes = distributed.store, distributed.processes
    # Processes of the pipeline hold different parameters, or the same ones alike: nothing is summed over them.
    over_replicas = store.sharded or any(entry.pieces[0].info.expert for entry in store.entries if entry.pieces)
    parts: dict[Tensor, list[Part]] = {
        entry.tensor: [
            Part(
                name=piece.info.name,
                start=piece.start,
                blocks=tuple((b.row, b.rows, b.col, b.cols) for b in piece.region.blocks),
                counted=(entry.divided or processes.tensor.rank == 0) and (entry.counted_among_replicas or not over_replicas),
            )
            for piece in entry.pieces
        ]
        for entry in store.entries
    }

    def sum_(packed: Tensor) -> None:
        if faults.active("optim.skip_sum"):
            return
        processes.tensor.sum_(packed)
        if over_replicas:
            processes.replicas.sum_(packed)

    optimizer.bind(parts, {i.name: i.shape for i in store.infos if i.parameter.requires_grad}, sum_)


def build_schedule(config: DictConfig, optimizer: torch.optim.Optimizer) -> Any:
    """Return the learning-rate schedule over `train.train_iter` updates, warm-up by `train.warmup_ratio`."""
    train = config.train
    call = train.scheduler
    if call is None:
        call = LazyConfig.load(Path(__file__).parent.parent / "recipes/common/train.py").train.scheduler
    given = {} if "warmup_iter" in call else {"warmup_iter": math.ceil(train.train_iter * train.warmup_ratio)}
    if "max_iter" not in call:
        given["max_iter"] = train.train_iter
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = instantiate(call, optimizer=optimizer, **given)
    if global_rank() == 0:
        for warning in caught:
            print(f"warning: {warning.message}", file=sys.stderr, flush=True)
    return schedule
