"""Metrics equal known values, whatever the batch size and the number of processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dufu.config import LazyCall
from dufu.config.registry import register_metric
from dufu.errors import ConfigError
from dufu.models.chain import Batch
from dufu.training.evaluation import evaluate
from dufu.training.metrics import F1, Accuracy, ClsEvaluator, Metric, Pearson, RegEvaluator, Spearman, TopK, build_metrics
from dufu.training.precision import Precision
from tests.pool import Ranks
from tests.small import metrics
from tests.training.plain import laid_out
from tests.training.trials import again, run

CLASSES, SAMPLES = 4, 23


class Judge(nn.Module):
    """Scores are given with the sample; the loss is their cross-entropy."""

    objectives = {"loss": "tokens"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, batch: Batch) -> Any:
        scores = batch.extra["scores"] * self.weight
        if batch.labels is None:
            return scores
        loss = nn.functional.cross_entropy(scores, batch.labels, reduction="sum")
        return {"loss": loss, "tokens": (batch.labels >= 0).sum()}


def truth(classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, classes, generator=generator), torch.randint(classes, (SAMPLES,), generator=generator)


class Samples:
    def __init__(self, scores: Tensor, labels: Tensor) -> None:
        self.scores, self.labels = scores, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "input_ids": torch.zeros(1).long().numpy(),
            "labels": self.labels[index].numpy(),
            "scores": self.scores[index].numpy(),
        }


def measured(which: list[Metric], micro: int, scores: Tensor, labels: Tensor) -> dict[str, float]:
    from dufu.parallel.process import leave

    made, _ = laid_out(Judge)
    found = evaluate(made, Samples(scores, labels), micro, Precision("O0", torch.bfloat16), None, which)
    leave()
    return found


def test_classification_equals_torchmetrics_on_any_number_of_ranks(ranks: Ranks) -> None:
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_f1_score

    scores, labels = truth()
    own: list[Metric] = [Accuracy(), TopK([2, 3]), F1()]
    known = {
        "accuracy": float(multiclass_accuracy(scores, labels, CLASSES, average="micro")),
        "top_2": float(multiclass_accuracy(scores, labels, CLASSES, average="micro", top_k=2)),
        "top_3": float(multiclass_accuracy(scores, labels, CLASSES, average="micro", top_k=3)),
        "f1": float(multiclass_f1_score(scores, labels, CLASSES, average="macro")),
        "loss": float(nn.functional.cross_entropy(scores, labels)),
    }
    for size, micro in ((1, 23), (1, 4), (2, 5), (3, 1)):
        for found in ranks(size, measured, own, micro, scores, labels):
            assert {k: found[k] for k in known} == pytest.approx(known, rel=1e-6)
            assert found["tokens"] == SAMPLES


def test_correlations_equal_scipy_on_any_number_of_ranks(ranks: Ranks) -> None:
    from scipy.stats import pearsonr, spearmanr

    scores, labels = truth(1)
    labels = (scores[:, 0] * 2 + torch.randn(SAMPLES, generator=torch.Generator().manual_seed(4))).round().long() + 5
    values = (scores[:, 0].numpy(), labels.numpy())
    known = {"pearson": pearsonr(*values).statistic, "spearman": spearmanr(*values).statistic}
    found = [measured_rows(scores, labels, n, micro) for n, micro in ((1, 23), (1, 3))]
    found += ranks(3, measured_rows, scores, labels, 3, 2)
    for values in found:
        # torchmetrics adds 1e-6 to the denominator of Spearman's
        assert {k: values[k] for k in known} == pytest.approx(known, rel=1e-6)
        assert values["corr"] == pytest.approx(sum(known.values()) / 2)
    assert all(values == found[0] for values in found)  # the rows arrive in the dataset's order: the same to the last bit


def measured_rows(scores: Tensor, labels: Tensor, size: int, micro: int) -> dict[str, float]:
    class Squared(Judge):
        def forward(self, batch: Batch) -> Any:
            scores = batch.extra["scores"] * self.weight
            if batch.labels is None:
                return scores
            return {"loss": (scores[:, 0] - batch.labels).pow(2).sum(), "tokens": (batch.labels >= 0).sum()}

    from dufu.parallel.process import leave

    made, _ = laid_out(Squared)
    found = evaluate(made, Samples(scores, labels), micro, Precision("O0", torch.bfloat16), None, [RegEvaluator()])
    leave()
    return {k: v for k, v in found.items() if k in ("pearson", "spearman", "corr")}


def test_ten_values_on_three_ranks_are_ten(ranks: Ranks) -> None:
    # A duplicate that fills the last batch would make them twelve, and change the mean.
    labels = torch.arange(10) % 2
    right = torch.arange(10) < 7
    scores = torch.stack([torch.zeros(10), torch.where(right == (labels == 1), 1.0, -1.0)], -1)
    for found in ranks(3, measured, [Accuracy()], 4, scores, labels):
        assert (found["accuracy"], found["tokens"]) == (0.7, 10)


def test_equal_scores_go_to_the_smaller_class() -> None:
    scores, labels = torch.zeros(3, 4), torch.tensor([0, 1, 3])
    found = measured([TopK([1, 2, 3, 9])], 2, scores, labels)
    assert [found[f"top_{k}"] for k in (1, 2, 3, 9)] == [pytest.approx(v) for v in (1 / 3, 2 / 3, 2 / 3, 1.0)]


def test_names_calls_and_lists() -> None:
    assert build_metrics(None) == []
    assert [type(m) for m in build_metrics(["f1", "pearson"])] == [F1, Pearson]
    call = LazyCall("dufu.training.metrics.ClsEvaluator")(topk=(1, 5))
    assert [m.names() for m in build_metrics(call)] == [["Acc@1", "Acc@5"]]
    assert isinstance(build_metrics("spearman")[0], Spearman)
    with pytest.raises(ConfigError, match='did you mean "accuracy"'):
        build_metrics("acuracy")
    with pytest.raises(ConfigError, match="two metrics are called pearson"):
        build_metrics(["pearson", "RegEvaluator"])
    with pytest.raises(ConfigError, match="is no metric"):
        build_metrics(LazyCall("dufu.layers.LayerNorm")(normalized_shape=3))
    with pytest.raises(ConfigError, match="topk=\\[0\\]"):
        ClsEvaluator(topk=[0])


@register_metric("tests_rows")
class Rows(Metric):
    """How many tokens a metric sees, in all rows and as a share of those that the model scored."""

    keeps_rows = True

    def names(self) -> list[str]:
        return ["rows"]

    def rows(self, scores: Tensor, labels: Tensor) -> Tensor:
        return labels.unsqueeze(-1)

    def of_rows(self, rows: Tensor) -> dict[str, float]:
        return {"rows": float(len(rows))}


@register_metric("tests_share")
class Share(Metric):
    def names(self) -> list[str]:
        return ["share"]

    def sums(self, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"seen": torch.tensor(len(labels))}

    def of_sums(self, own: Any, model: dict[str, float], objectives: dict[str, str]) -> dict[str, float]:
        return {"share": float(own["seen"]) / model["tokens"]}


def run_knowing_them(folder: str, corpus: str, overrides: list[str]) -> dict[str, Any]:
    """Train where this module has been imported, and so has registered its metrics."""
    return run(folder, corpus, overrides)


@pytest.mark.parametrize(
    ("size", "layout"),
    [(2, []), (2, ["context"]), (4, ["context", "pipeline"])],
    ids=["dp2", "cp2", "pp2xcp2"],
)
def test_a_metric_sees_each_token_once(size: int, layout: list[str], ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    own = ["train.evaluation.evaluator=[tests_rows,tests_share]", "train.evaluation.eval_period=2", "train.train_iter=2",
           *(f"train.dist.{name}_parallel_size=2" for name in layout)]  # fmt: skip
    ranks(size, run_knowing_them, str(tmp_path), str(corpus), own)
    record = metrics(tmp_path, "valid")[-1]
    assert record["rows"] == record["tokens"] > 100 and record["share"] == 1.0


def test_a_run_writes_its_metrics_and_keeps_the_best_by_one(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    own = ["train.evaluation.evaluator=[accuracy,ClsEvaluator,PPLEvaluator]", "train.evaluation.eval_period=2", "train.train_iter=4",
           "train.evaluation.eval_metric=Acc@5", "train.evaluation.eval_mode=max"]  # fmt: skip
    for size, layout in ((1, []), (2, ["train.dist.tensor_parallel_size=2"])):
        folder = tmp_path / str(size)
        ranks(size, run, str(folder), str(corpus), [*own, *layout])
        for record in metrics(folder, "valid"):
            assert record["Acc@1"] == pytest.approx(100 * record["accuracy"])
            assert record["loss_PPL"] == pytest.approx(math.exp(record["loss"])) == record["perplexity"]
            assert 100 >= record["Acc@5"] >= record["Acc@1"]
    assert metrics(tmp_path / "1", "valid")[0]["Acc@5"] == metrics(tmp_path / "2", "valid")[0]["Acc@5"]
    best = max(metrics(tmp_path / "1", "valid"), key=lambda r: r["Acc@5"])["step"]
    assert (tmp_path / "1" / "checkpoints" / "best").read_text() == f"step_{best:07d}\n"
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    again_found = ranks(2, again, str(tmp_path / "1"), [], {"eval_only": True, "resume": False})[0]
    last = metrics(tmp_path / "1", "valid")[-1]
    assert again_found["metrics"] == pytest.approx({k: v for k, v in last.items() if k not in ("step", "split")}, rel=1e-6)
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before  # evaluating writes nothing
    error = ranks(1, run, str(tmp_path / "x"), str(corpus), ["train.evaluation.eval_metric=Acc@1"])[0]["error"]
    assert 'eval_metric="Acc@1" is not measured' in error


def test_early_stopping_counts_over_a_resume(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    # A metric that falls is never better in mode "max": the first evaluation stays the best.
    own = ["train.evaluation.eval_period=1", "train.evaluation.eval_mode=max", "train.early_stopping.patience=3", "train.train_iter=20",
           "optim.lr=1e-2"]  # fmt: skip
    ranks(1, run, str(tmp_path), str(corpus), [*own, "train.stop_at_step=3"])
    found = ranks(1, run, str(tmp_path), str(corpus), own, {"resume": True})[0]
    valid = metrics(tmp_path, "valid")
    best = max(valid, key=lambda r: r["loss"])["step"]
    assert (found["step"], found["finished"]) == (best + 3, True)
    assert f"stopping (best {valid[best - 1]['loss']:.6g} at step {best})" in (tmp_path / "log.txt").read_text()
    assert ranks(1, run, str(tmp_path), str(corpus), own, {"resume": True})[0]["step"] == best + 3
    assert f"it stopped early at step {best + 3}" in (tmp_path / "log.txt").read_text()


def alone(what: str, folder: str) -> str:
    """Call a function on rank 0 only, while rank 1 goes on to the next step."""
    from datetime import timedelta

    from dufu.errors import DufuError
    from dufu.parallel.process import leave
    from dufu.training.writing import Pieces, Writing

    scores, labels = truth()
    made, processes = laid_out(Judge)
    processes.world.patience = timedelta(seconds=1)
    try:
        if processes.world.rank == 1:
            processes.world.sum_(torch.zeros(1))
        elif what == "evaluate":
            evaluate(made, Samples(scores, labels), 4, Precision("O0", torch.bfloat16))
        else:
            Writing(Path(folder), processes, Pieces(), {}, "").begin()
    except DufuError as error:
        return str(error)
    except RuntimeError as error:
        return f"rank {processes.world.rank}: {type(error).__name__}"
    finally:
        leave()
    return "went on"


@pytest.mark.parametrize("what", ["evaluate", "save"])
def test_what_all_must_call_fails_soon_when_one_calls_it(what: str, ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, alone, what, str(tmp_path / "step_1"))
    assert "must be called by every process" in first and "Rank" in first
    assert second == "rank 1: RuntimeError"


def test_weights_of_another_run_can_be_the_first_ones(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    ranks(1, run, str(tmp_path / "a"), str(corpus), ["train.train_iter=3"])
    weights = f"train.load_weight={tmp_path}/a"
    measured = ranks(1, run, str(tmp_path / "b"), str(corpus), [weights, "train.seed=9"], {"eval_only": True})[0]["metrics"]
    last = metrics(tmp_path / "a", "valid")[-1]
    assert {k: last[k] for k in measured} == measured
    ranks(2, run, str(tmp_path / "c"), str(corpus), [weights, "train.train_iter=1", "optim.lr=0.0"])
    valid = metrics(tmp_path / "c", "valid")[-1]
    assert valid["loss"] == pytest.approx(last["loss"], rel=1e-6)
    error = ranks(1, run, str(tmp_path / "d"), str(corpus), [weights, "model.cfg.hidden_layers=3"])[0]["error"]
    assert "is of another model: missing layers.2." in error
