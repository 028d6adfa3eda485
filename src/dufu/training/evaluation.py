"""Evaluation in the training layout: each sample once, sums over tokens, nothing gathered but sums."""

from __future__ import annotations

import math
from typing import Any

import torch

from dufu.parallel.build import Distributed
from dufu.training.batches import evaluation_batches
from dufu.training.precision import Precision
from dufu.training.step import Totals


def reduce_totals(totals: Totals, distributed: Distributed) -> dict[str, float]:
    """Return the sums over all processes, in one message."""
    if not totals.sums:
        return {}
    names = sorted(totals.sums)
    packed = torch.stack([totals.sums[name].double() for name in names])
    distributed.processes.data.sum_(packed)
    return dict(zip(names, packed.tolist()))


def metrics_of(sums: dict[str, float], objectives: dict[str, str]) -> dict[str, float]:
    """Return loss, perplexity and accuracies from sums: `correct` over `tokens`, `x_correct` over `x`."""
    out: dict[str, float] = {}
    losses = {name: sums[name] / max(1.0, sums[by]) for name, by in objectives.items()}
    out["loss"] = sum(losses.values())
    if len(losses) > 1:
        out.update(losses)
    for name, value in sums.items():
        if name == "correct":
            out["accuracy"] = value / max(1.0, sums["tokens"])
        elif name.endswith("_correct"):
            what = name.removesuffix("_correct")
            out[f"{what}_accuracy"] = value / max(1.0, sums[what])
    return out


def evaluate(
    distributed: Distributed, dataset: Any, micro: int, precision: Precision, limit: int | None = None
) -> dict[str, float]:
    """Return the model's metrics on a dataset: they do not depend on batch size, padding or number of processes.

    Args:
        dataset: samples.
        micro: samples of one forward.
        limit: most forwards on a process.
    """
    model, processes = distributed.model, distributed.processes
    totals = Totals()
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in evaluation_batches(dataset, micro, processes.data.rank, processes.data.size, processes.device, limit):
                with precision.autocast(processes.device):
                    sums = model(batch)
                for name, value in sums.items():
                    totals.add(name, value)
    finally:
        model.train(was_training)
    sums = reduce_totals(totals, distributed)
    found = metrics_of(sums, model.objectives)
    if len(model.objectives) == 1:
        found["perplexity"] = math.exp(min(found["loss"], 700.0))
    found["tokens"] = sums["tokens"]
    return found
