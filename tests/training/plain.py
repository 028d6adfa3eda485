"""A model whose token losses are given: loss = w₀ · Σ value over scored tokens, so that every number can be checked by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dufu.layers.loss import IGNORE
from dufu.models.chain import Batch
from dufu.optim.schedules import Schedule
from dufu.parallel.build import Distributed, distribute
from dufu.parallel.layout import ParallelLayout
from dufu.parallel.process import Processes, join, world_size
from dufu.training.precision import LossScaler, Precision
from dufu.training.step import TrainStep


class Given(nn.Module):
    """Token losses are `extra["values"]`, scored where the label is not IGNORE; `reset_parameters` sets w to one."""

    objectives = {"loss": "tokens"}  # noqa: RUF012

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def counts(self, batch: Batch) -> dict[str, int]:
        assert batch.labels is not None
        return {"tokens": int((batch.labels != IGNORE).sum())}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        assert batch.labels is not None
        scored = batch.labels != IGNORE
        values = batch.extra["values"].to(self.weight.dtype) * self.weight[0]
        return {"loss": values[scored].sum(), "tokens": scored.sum()}


def rows(*values: Sequence[float]) -> Batch:
    """Return a batch of one row a sequence, padded with tokens that are not scored (and would be 1000 if they were)."""
    width = max(len(v) for v in values)
    labels = torch.tensor([[0] * len(v) + [IGNORE] * (width - len(v)) for v in values])
    given = torch.tensor([[*v, *[1000.0] * (width - len(v))] for v in values])
    return Batch(torch.zeros_like(labels), labels, extra={"values": given})


class Same(Schedule):
    def inner(self, base: float, t: int) -> float:
        return base


def laid_out(
    make: Callable[[], nn.Module], precision: Precision | None = None, layout: ParallelLayout | None = None
) -> tuple[Distributed, Processes]:
    processes = join(layout or ParallelLayout(data=world_size()), torch.device("cpu"))
    p = precision or Precision("O0", torch.bfloat16)
    made = distribute(
        make, processes, lambda m: [{"params": list(m.parameters())}], seed=1, compute_dtype=p.compute_dtype, master=p.master
    )
    return made, processes


def step_of(
    make: Callable[[], nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    precision: Precision | None = None,
    scaler: LossScaler | None = None,
    clip: float = 0.0,
    layout: ParallelLayout | None = None,
) -> TrainStep:
    """Return the real training step over such a model, on the processes that are there."""
    made, _ = laid_out(make, precision, layout)
    built = optimizer(made.groups)
    return TrainStep(made, built, Same(built, 1), precision or Precision("O0", torch.bfloat16), scaler, clip, 2.0)


def sgd(lr: float = 1.0) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda groups: torch.optim.SGD(groups, lr=lr)


def weight(step: TrainStep) -> list[float]:
    return [v for entry in step.distributed.store.entries for v in entry.tensor.detach().float().view(-1).tolist()]
