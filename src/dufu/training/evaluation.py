"""Evaluation in the training layout: each sample once, sums over tokens, nothing gathered but sums and small rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dufu.errors import ConfigError, nearest
from dufu.layers.loss import IGNORE
from dufu.models.chain import Batch
from dufu.parallel.build import Distributed
from dufu.parallel.collectives import Communicator
from dufu.training.batches import evaluation_batches
from dufu.training.metrics import Metric, exponential
from dufu.training.precision import Precision
from dufu.training.step import Totals


def reduce_totals(totals: Totals, distributed: Distributed) -> dict[str, float]:
    """Return the sums over all processes, in one message."""
    names, processes = _names(totals, distributed), distributed.processes
    packed = torch.zeros(len(names), dtype=torch.float64, device=processes.device)
    for place, name in enumerate(names):
        if name in totals.sums:
            packed[place] = totals.sums[name]
    processes.replicas.sum_(packed)
    processes.pipeline.sum_(packed)
    return dict(zip(names, packed.tolist()))


def _names(totals: Totals, distributed: Distributed) -> list[str]:
    """Return the names of all sums: those of the pipeline's last stage, which alone has any."""
    return sorted({name for names in distributed.processes.pipeline.objects(list(totals.sums)) for name in names})


def gather_totals(totals: Totals, distributed: Distributed) -> dict[str, list[float]]:
    """Return each replica's own sums."""
    names, processes = _names(totals, distributed), distributed.processes
    packed = torch.zeros(processes.replicas.size, len(names), dtype=torch.float64, device=processes.device)
    for place, name in enumerate(names):
        if name in totals.sums:
            packed[processes.replicas.rank, place] = totals.sums[name]
    processes.replicas.sum_(packed)
    processes.pipeline.sum_(packed)
    return dict(zip(names, packed.T.tolist()))


def _ratio(value: float, count: float) -> float:
    return value / count if count else math.nan


def metrics_of(sums: dict[str, float], objectives: dict[str, str]) -> dict[str, float]:
    """Return loss and accuracies from sums: `correct` over `tokens`, `x_correct` over `x`, `x_correct@k` too; NaN where nothing was scored."""
    out: dict[str, float] = {}
    losses = {name: _ratio(sums[name], sums[by]) for name, by in objectives.items()}
    out["loss"] = sum(losses.values())
    if len(losses) > 1:
        out.update(losses)
    for name, value in sums.items():
        if name == "correct":
            out["accuracy"] = _ratio(value, sums["tokens"])
        elif "_correct@" in name:
            what, k = name.split("_correct@")
            out[f"accuracy@{k}"] = _ratio(value, sums[what])
        elif name.endswith("_correct"):
            what = name.removesuffix("_correct")
            out[f"{what}_accuracy"] = _ratio(value, sums[what])
    return out


def check_metric_name(name: str, objectives: dict[str, str], metrics: Sequence[Metric]) -> None:
    """Raise ConfigError, before any work, when the metric that decides which checkpoint is best is none of those measured."""
    known = ["loss", *objectives, *(["perplexity"] if len(objectives) == 1 else []), *(n for m in metrics for n in m.names())]
    if name not in known and not name.partition("@")[0].endswith("accuracy"):  # a model's own accuracies show in its sums only
        raise ConfigError(f'train.evaluation.eval_metric="{name}" is not measured{nearest(name, [*known, "accuracy"])}')


def evaluate(
    distributed: Distributed,
    dataset: Any,
    micro: int,
    precision: Precision,
    limit: int | None = None,
    metrics: Sequence[Metric] = (),
) -> dict[str, float]:
    """Return the model's metrics on a dataset: they do not depend on batch size, padding or number of processes.

    Args:
        dataset: samples.
        micro: samples of one forward.
        limit: most samples, the first ones; None = all.
        metrics: further ones, beside the model's own sums.
    """
    model, processes = distributed.model, distributed.processes
    processes.world.meet("evaluate()")
    totals, measured = Totals(), [_Measured(metric) for metric in metrics]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), precision.autocast(processes.device):
            for batch in evaluation_batches(dataset, micro, processes.data.rank, processes.data.size, processes.device, limit):
                result = distributed.runner.forward(batch)
                for name, value in (result or {}).items():
                    totals.add(name, value)
                if any(metric.needs_scores for metric in metrics):
                    pairs = scored_pairs(distributed.runner.forward, model.objectives, batch)
                    for each in measured if pairs else ():
                        each.update(pairs)
    finally:
        model.train(was_training)
    sums = reduce_totals(totals, distributed)
    found = metrics_of(sums, model.objectives)
    if len(model.objectives) == 1:
        found["perplexity"] = exponential(found["loss"])
    if distributed.runner.has_result:
        for each in measured:
            # Scores are made of whole samples, so those that share positions all have the same rows.
            found |= each.values(sums, model.objectives, processes.data)
    found["tokens"] = int(sums["tokens"])
    everywhere = processes.pipeline.objects(found if distributed.runner.has_result else None)
    return next(each for each in reversed(everywhere) if each is not None)


def scored_pairs(forward: Callable[[Batch], Any], objectives: Iterable[str], batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (scores (N, C), labels (N,)) of what each objective scores in a batch; nothing where the pipeline does not end.

    Args:
        forward: gives scores for a batch without labels; None where the pipeline does not end.
        objectives: the model's.

    A model whose forward without labels returns a dict names its scores by objective; the labels are then in `batch.extra` under
    `OBJECTIVE_labels`, or else the batch's own, or the only ones there are.

    Raises:
        ConfigError: scores and labels do not belong together.
    """
    scores = forward(batch.without_labels())
    if scores is None:
        return {}
    named: dict[str, Tensor] = scores if isinstance(scores, dict) else {next(iter(objectives)): scores}
    pairs = {}
    for name, value in named.items():
        own = [value for key, value in batch.extra.items() if key.endswith("labels")]
        only = own[0] if batch.scored_labels is None and len(own) == 1 else batch.scored_labels
        labels = batch.extra.get(f"{name}_labels", only)
        if labels is None or value.shape[: labels.dim()] != labels.shape:
            shape = None if labels is None else tuple(labels.shape)
            raise ConfigError(f"train.evaluation.evaluator: scores {tuple(value.shape)} of {name} do not fit labels {shape}")
        chosen = labels != IGNORE
        pairs[name] = (value[chosen], labels[chosen])
    return pairs


class _Measured:
    """A metric's running sums, or the rows that it keeps."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.sums: dict[str, Tensor] = {}
        self.rows: list[Tensor] = []

    def update(self, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Take in a batch."""
        if not self.metric.needs_scores:
            return
        scores, labels = pairs[self.metric.choose(list(pairs))]
        if self.metric.keeps_rows:
            self.rows.append(self.metric.rows(scores.float(), labels).double().cpu())
            return
        for name, value in self.metric.sums(scores.float(), labels).items():
            value = value.double()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def values(self, sums: dict[str, float], objectives: dict[str, str], data: Communicator) -> dict[str, float]:
        """Return the metric over all processes that have samples of their own; called by all of them."""
        if self.metric.keeps_rows:
            parts = data.objects(torch.cat(self.rows))
            return self.metric.of_rows(torch.cat(parts))
        for value in self.sums.values():
            data.sum_(value)
        return self.metric.of_sums(self.sums, sums, objectives)
