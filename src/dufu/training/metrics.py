"""Metrics of evaluation beside the model's own sums: `train.evaluation.evaluator=top_k`, a recorded call, or a list of them.

A metric adds up counts over everything that is scored, or keeps one small row for each scored thing; so its value depends neither on
the batch size nor on the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dufu.config.instantiate import instantiate
from dufu.config.registry import lookup, register_metric
from dufu.errors import ConfigError, nearest

Counts = dict[str, Tensor]


def exponential(loss: float) -> float:
    """Return e^loss, infinite where it exceeds what a float holds."""
    return math.exp(loss) if loss < 700.0 or math.isnan(loss) else math.inf


def _ratio(value: float, count: float) -> float:
    return value / count if count else math.nan


class Metric:
    """Base of metrics. A subclass gives `sums` and `of_sums`, or sets `keeps_rows` and gives `rows` and `of_rows`.

    Args:
        objective: which of the model's objectives is measured; None = the first.
    """

    needs_scores = True  # whether the model's scores are wanted, or only its own sums
    keeps_rows = False

    def __init__(self, objective: str | None = None) -> None:
        self.objective = objective

    def names(self) -> list[str]:
        """Return the names of the values."""
        raise NotImplementedError

    def choose(self, available: Sequence[str]) -> str:
        """Return the measured objective.

        Raises:
            ConfigError: the model has none of that name.
        """
        name = self.objective or available[0]
        if name not in available:
            raise ConfigError(f'train.evaluation.evaluator: the model has no scores called "{name}"{nearest(name, available)}')
        return name

    def sums(self, scores: Tensor, labels: Tensor) -> Counts:
        """Return what adds up over batches and processes: scores (N, C), labels (N,)."""
        raise NotImplementedError

    def of_sums(self, own: Counts, model: dict[str, float], objectives: dict[str, str]) -> dict[str, float]:
        """Return the values from the metric's own sums, the model's sums and the counts that divide its losses."""
        raise NotImplementedError

    def rows(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the (N, K) numbers to keep: scores (N, C), labels (N,)."""
        raise NotImplementedError

    def of_rows(self, rows: Tensor) -> dict[str, float]:
        """Return the values from all rows (N, K), which are in the dataset's order."""
        raise NotImplementedError


@register_metric("perplexity")
class Perplexity(Metric):
    """e to the mean loss of a token (not the mean of each batch's perplexity)."""

    needs_scores = False

    def names(self) -> list[str]:
        """See Metric."""
        return ["perplexity"]

    def of_sums(self, own: Counts, model: dict[str, float], objectives: dict[str, str]) -> dict[str, float]:
        """See Metric."""
        name = self.choose(list(objectives))
        return {self.names()[0]: exponential(_ratio(model[name], model[objectives[name]]))}


@register_metric("top_k")
class TopK(Metric):
    """Share of labels among the k highest scores; of equal scores the smaller class comes first.

    Args:
        topk: one k or several.
        objective: see Metric.
    """

    def __init__(self, topk: int | Sequence[int] = (1, 5), objective: str | None = None) -> None:
        super().__init__(objective)
        self.topk = [topk] if isinstance(topk, int) else [int(k) for k in topk]
        if not self.topk or min(self.topk) < 1:
            raise ConfigError(f"train.evaluation.evaluator: topk={list(self.topk)}; one or more numbers of at least 1")

    def name(self, k: int) -> str:
        """Return the name of one value."""
        return f"top_{k}"

    def names(self) -> list[str]:
        """See Metric."""
        return [self.name(k) for k in self.topk]

    def sums(self, scores: Tensor, labels: Tensor) -> Counts:
        """See Metric."""
        mine = scores.gather(-1, labels.unsqueeze(-1))
        earlier = torch.arange(scores.shape[-1], device=scores.device) < labels.unsqueeze(-1)
        place = ((scores > mine) | ((scores == mine) & earlier)).sum(-1)
        hits = {self.name(k): (place < k).sum() for k in self.topk}
        return {**hits, "count": torch.tensor(len(labels), device=scores.device)}

    def of_sums(self, own: Counts, model: dict[str, float], objectives: dict[str, str]) -> dict[str, float]:
        """See Metric."""
        return {self.name(k): _ratio(float(own[self.name(k)]), float(own["count"])) for k in self.topk}


@register_metric("accuracy")
class Accuracy(TopK):
    """Share of labels that have the highest score."""

    def __init__(self, objective: str | None = None) -> None:
        super().__init__(1, objective)

    def name(self, k: int) -> str:
        """See TopK."""
        return "accuracy"


@register_metric("f1")
class F1(Metric):
    """The harmonic mean of precision and recall (van Rijsbergen, 1979).

    Args:
        average: "macro" over the classes that occur as a label or a prediction; "micro"; or "binary": of class 1 alone.
        objective: see Metric.
    """

    def __init__(self, average: Literal["macro", "micro", "binary"] = "macro", objective: str | None = None) -> None:
        super().__init__(objective)
        if average not in ("macro", "micro", "binary"):
            raise ConfigError(f'train.evaluation.evaluator: average="{average}"; one of "macro", "micro", "binary"')
        self.average = average

    def names(self) -> list[str]:
        """See Metric."""
        return ["f1"]

    def sums(self, scores: Tensor, labels: Tensor) -> Counts:
        """See Metric."""
        chosen, classes = scores.argmax(-1), scores.shape[-1]
        return {
            "hits": torch.bincount(labels[chosen == labels], minlength=classes),
            "chosen": torch.bincount(chosen, minlength=classes),
            "true": torch.bincount(labels, minlength=classes),
        }

    def of_sums(self, own: Counts, model: dict[str, float], objectives: dict[str, str]) -> dict[str, float]:
        """See Metric."""
        hits, total = own["hits"], own["chosen"] + own["true"]
        if self.average == "micro":
            return {"f1": _ratio(2 * float(hits.sum()), float(total.sum()))}
        if self.average == "binary":
            return {"f1": _ratio(2 * float(hits[1]), float(total[1]))}
        occur = total > 0
        return {"f1": float((2 * hits[occur] / total[occur]).mean())}


class Correlation(Metric):
    """Base of correlations between a score (of several: the best class's number) and its label."""

    keeps_rows = True

    def rows(self, scores: Tensor, labels: Tensor) -> Tensor:
        """See Metric."""
        single = scores.dim() == 1 or scores.shape[-1] == 1
        value = scores.reshape(-1) if single else scores.argmax(-1)
        return torch.stack([value.double(), labels.double()], -1)


@register_metric("pearson")
class Pearson(Correlation):
    """Pearson's correlation."""

    def names(self) -> list[str]:
        """See Metric."""
        return ["pearson"]

    def of_rows(self, rows: Tensor) -> dict[str, float]:
        """See Metric."""
        from torchmetrics.functional import pearson_corrcoef

        return {"pearson": float(pearson_corrcoef(rows[:, 0], rows[:, 1]))}


@register_metric("spearman")
class Spearman(Correlation):
    """Spearman's rank correlation."""

    def names(self) -> list[str]:
        """See Metric."""
        return ["spearman"]

    def of_rows(self, rows: Tensor) -> dict[str, float]:
        """See Metric."""
        from torchmetrics.functional import spearman_corrcoef

        return {"spearman": float(spearman_corrcoef(rows[:, 0], rows[:, 1]))}


@register_metric("ClsEvaluator")
class ClsEvaluator(TopK):
    """TopK under LiBai's name and keys: `Acc@1` … in percent."""

    def name(self, k: int) -> str:
        """See TopK."""
        return f"Acc@{k}"

    def of_sums(self, own: Counts, model: dict[str, float], objectives: dict[str, str]) -> dict[str, float]:
        """See Metric."""
        return {name: 100.0 * value for name, value in super().of_sums(own, model, objectives).items()}


@register_metric("PPLEvaluator")
class PPLEvaluator(Perplexity):
    """Perplexity under LiBai's name and key, `LOSS_PPL`; over tokens, where LiBai takes the mean over batches."""

    def names(self) -> list[str]:
        """See Metric."""
        return [f"{self.objective or 'loss'}_PPL"]


@register_metric("RegEvaluator")
class RegEvaluator(Correlation):
    """Pearson's and Spearman's correlation and their mean, under LiBai's name and keys."""

    def names(self) -> list[str]:
        """See Metric."""
        return ["pearson", "spearman", "corr"]

    def of_rows(self, rows: Tensor) -> dict[str, float]:
        """See Metric."""
        found = Pearson().of_rows(rows) | Spearman().of_rows(rows)
        return {**found, "corr": (found["pearson"] + found["spearman"]) / 2}


def build_metrics(evaluator: Any) -> list[Metric]:
    """Return the metrics that `train.evaluation.evaluator` names: a short name, a recorded call, or a list of them.

    Raises:
        ConfigError: one of them is no metric, or two have a value of the same name.
    """
    if evaluator is None:
        return []
    several = not isinstance(evaluator, str) and not (hasattr(evaluator, "keys") and "_target_" in evaluator)
    metrics: list[Metric] = []
    for item in evaluator if several else [evaluator]:
        built = lookup(item, "metric")() if isinstance(item, str) else instantiate(item)
        if not isinstance(built, Metric):
            raise ConfigError(
                f"train.evaluation.evaluator: {item!r} is no metric; see dufu show, or derive from dufu.training.metrics.Metric"
            )
        taken = {name for metric in metrics for name in metric.names()}
        twice = taken & set(built.names())
        if twice:
            raise ConfigError(f"train.evaluation.evaluator: two metrics are called {', '.join(sorted(twice))}")
        metrics.append(built)
    return metrics
