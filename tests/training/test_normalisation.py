"""The loss is the sum over tokens divided by their count over the global batch: never a mean of means."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dufu.layers.loss import IGNORE, cross_entropy_sum
from dufu.models.chain import Batch
from dufu.training.batches import blank
from dufu.training.evaluation import evaluate, metrics_of, reduce_totals
from dufu.training.precision import Precision
from tests.pool import Ranks
from tests.training.plain import Given, laid_out, rows, sgd, step_of, weight

O0 = Precision("O0", torch.bfloat16)


def logged(step: Any) -> dict[str, float]:
    return metrics_of(reduce_totals(step.totals, step.distributed), step.distributed.model.objectives)


def test_micro_batches_of_unequal_length_weigh_by_tokens() -> None:
    step = step_of(Given, sgd())
    step(0, [rows([4.0]), rows([0.0, 0.0, 0.0])])
    assert logged(step)["loss"] == 1.0
    assert float(step.grad_norm) == 1.0
    assert weight(step) == [0.0]


def test_equal_micro_batches_are_divided_once() -> None:
    several, one = step_of(Given, sgd()), step_of(Given, sgd())
    several(0, [rows([1.0, 2.0])] * 4)
    one(0, [rows([1.0, 2.0])])
    assert logged(several)["loss"] == logged(one)["loss"] == 1.5
    assert float(several.grad_norm) == float(one.grad_norm) == 1.5


def test_the_log_holds_the_mean_of_all_micro_batches() -> None:
    step = step_of(Given, sgd())
    step(0, [rows([v]) for v in (1.0, 2.0, 3.0, 6.0)])
    assert logged(step)["loss"] == 3.0


def test_a_short_last_window_is_divided_by_what_it_holds() -> None:
    step = step_of(Given, sgd(0.25))
    for number, size in enumerate((4, 4, 2)):
        step(number, [rows([1.0])] * size)
        assert float(step.grad_norm) == 1.0
    assert weight(step) == [0.25]


def test_clipping_happens_once_a_step() -> None:
    class Two(Given):
        def forward(self, batch: Batch) -> dict[str, Tensor]:
            sums = super().forward(batch)
            return {**sums, "loss": (self.weight * batch.extra["gradient"]).sum()}

    def one(*gradient: float) -> Batch:
        batch = rows([1.0])
        batch.extra["gradient"] = torch.tensor(gradient) * 2  # two tokens are scored in the global batch
        return batch

    step = step_of(lambda: Two(2), sgd(), clip=1.0)
    step(0, [one(3.0, 0.0), one(0.0, 4.0)])
    assert float(step.grad_norm) == 5.0
    assert weight(step) == pytest.approx([1 - 0.6, 1 - 0.8], abs=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_bad_micro_batch_skips_the_whole_step(value: float) -> None:
    step = step_of(Given, sgd())
    step(0, [rows([1.0]), rows([1.0]), rows([value]), rows([1.0])])
    assert step.skipped and weight(step) == [1.0]
    assert not math.isfinite(logged(step)["loss"])
    step(1, [rows([1.0])])
    assert not step.skipped and weight(step) == [0.0]


class Words(nn.Module):
    """Scores words by an embedding, with label smoothing: (B, T) → sums."""

    objectives = {"loss": "tokens"}  # noqa: RUF012

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.scores = nn.Embedding(7, 7)

    def counts(self, batch: Batch) -> dict[str, int]:
        assert batch.labels is not None
        return {"tokens": int((batch.labels != IGNORE).sum())}

    def forward(self, batch: Batch) -> Any:
        scores = self.scores(batch.input_ids)
        if batch.labels is None:
            return scores
        labels = batch.labels.flatten()
        loss = cross_entropy_sum(scores.flatten(0, 1), labels, label_smoothing=self.smoothing)
        return {"loss": loss, "tokens": (labels != IGNORE).sum()}


def sentences() -> list[Batch]:
    """Return four sequences of lengths 2, 5, 9 and 3, one a batch, all padded to 9."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in (2, 5, 9, 3):
        ids = torch.randint(7, (1, 9), generator=generator)
        labels = torch.randint(7, (1, 9), generator=generator)
        labels[:, length:] = IGNORE
        made.append(Batch(ids, labels))
    return made


def joined(batches: list[Batch]) -> Batch:
    return Batch(torch.cat([b.input_ids for b in batches]), torch.cat([b.labels for b in batches if b.labels is not None]))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulation_equals_one_big_batch(smoothing: float) -> None:
    one, four = (step_of(lambda: Words(smoothing), sgd()) for _ in range(2))
    one(0, [joined(sentences())])
    four(0, sentences())
    # the same fp32 products, added in another order
    assert logged(four)["loss"] == pytest.approx(logged(one)["loss"], abs=1e-6)
    assert float(four.grad_norm) == pytest.approx(float(one.grad_norm), abs=1e-6)
    assert weight(four) == pytest.approx(weight(one), abs=1e-6)


def uneven_ranks() -> tuple[float, float, list[float]]:
    from dufu.parallel.process import leave

    step = step_of(Words, sgd())
    rank = step.distributed.processes.data.rank
    # rank 0 has three sequences and rank 1 has one; it takes part in the others with blanks
    mine = sentences()[:3] if rank == 0 else [sentences()[3], *(blank(sentences()[3]),) * 2]
    step(0, mine)
    answer = (logged(step)["loss"], float(step.grad_norm), weight(step))
    leave()
    return answer


def test_uneven_shares_equal_one_process(ranks: Ranks) -> None:
    one = step_of(Words, sgd())
    one(0, [joined(sentences())])
    for loss, norm, values in ranks(2, uneven_ranks):
        assert loss == pytest.approx(logged(one)["loss"], abs=1e-6)
        assert norm == pytest.approx(float(one.grad_norm), abs=1e-6)
        assert values == pytest.approx(weight(one), abs=1e-6)


class Rows:
    """Five samples of 1 to 4 scored tokens as arrays, padded to 4."""

    def __init__(self) -> None:
        self.batch = rows([4.0], [0.0, 0.0, 0.0], [2.0, 4.0], [1.0, 1.0, 1.0, 5.0], [3.0])

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.batch.labels is not None
        return {
            "input_ids": self.batch.input_ids[index].numpy(),
            "labels": self.batch.labels[index].numpy(),
            "values": self.batch.extra["values"][index].numpy(),
        }


def evaluated(micro: int, limit: int | None) -> dict[str, float]:
    from dufu.parallel.process import leave

    made, _ = laid_out(Given)
    found = evaluate(made, Rows(), micro, O0, limit)
    leave()
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_evaluation_depends_on_neither_batch_size_nor_ranks(size: int, ranks: Ranks) -> None:
    for micro in (1, 2, 5):
        # (4 + 0·3 + 6 + 8 + 3) / 11 tokens
        for found in ranks(size, evaluated, micro, None):
            assert found == {"loss": 21 / 11, "perplexity": pytest.approx(math.exp(21 / 11)), "tokens": 11}
        for found in ranks(size, evaluated, micro, 2):
            assert found == {"loss": 1.0, "perplexity": pytest.approx(math.e), "tokens": 4}
