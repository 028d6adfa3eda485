"""Mistakes cost nothing that was there before, and combinations that once went wrong without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.models.bert import BertClassifier
from dufu.models.chain import Batch
from dufu.models.gpt2 import GPT2
from dufu.training.evaluation import scored_pairs
from tests.pool import Ranks
from tests.small import TINY, dufu, metrics
from tests.training.trials import run, steps


class HalfFrozen(GPT2):
    """A GPT-2 of which only the head's norm and the last layer learn."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for module in (self.embedding, self.layers[0]):
            module.requires_grad_(False)


def fine_tune(folder: str, corpus: str, weights: str, overrides: list[str]) -> dict[str, Any]:
    from dufu.config.instantiate import trust

    trust("tests")
    own = ["model._target_=tests.training.test_mistakes.HalfFrozen", f"train.load_weight={weights}", "train.train_iter=2"]
    # The subclass takes plain arguments: the recipe's cfg is written out.
    cfg = {"hidden_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "max_seq_length": 24}
    return run(folder, corpus, [*own, *(f"model.cfg.{k}={v}" for k, v in cfg.items()), *overrides])


@pytest.fixture(scope="module")
def trained(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert ranks(1, run, str(folder), str(corpus), ["train.train_iter=30", "optim.lr=0.01"])[0]["step"] == 30
    return folder


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.load_weight=typo"], "typo"),
        (["train.evaluation.eval_metric=los"], 'did you mean "loss"'),
        (["train.ema.enabled=true", "train.ema.decay=1.5"], "decay"),
        (["optim=torch.optim.Adafactor"], "treats a parameter as a whole"),
        (["train.amp.enabled=true", "train.amp.dtype=fp16", "train.amp.init_scale=-8"], "init_scale=-8"),
        (["train.input_placement_device=nn"], "no such device"),
        (["dataloader.split=[1,0,0]", "train.early_stopping.patience=1"], "the validation split is empty"),
    ],
)
def test_overwriting_removes_nothing_before_all_is_checked(
    overrides: list[str], message: str, trained: Path, ranks: Ranks, corpus: Path
) -> None:
    before = steps(trained)
    found = ranks(1, run, str(trained), str(corpus), ["train.overwrite=true", *overrides])[0]
    assert message in found.get("error", ""), found
    assert steps(trained) == before


def test_a_run_may_begin_with_the_weights_of_the_one_it_replaces(trained: Path, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ranks(1, run, str(folder), str(corpus), ["train.load_weight=" + str(trained), "train.train_iter=1"])
    first = metrics(folder)[0]["loss"]
    found = ranks(1, run, str(folder), str(corpus), [f"train.load_weight={folder}", "train.overwrite=true", "train.train_iter=1"])
    assert found[0]["step"] == 1 and abs(metrics(folder)[0]["loss"] - first) < 0.2


@pytest.mark.parametrize("size", [1, 2])
def test_frozen_half_precision_weights_are_the_loaded_ones(
    size: int, trained: Path, ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    losses = {}
    for level in ("O0", "O2"):
        own = ["train.amp.enabled=true", f"train.amp.level={level}"]
        ranks(size, fine_tune, str(tmp_path / level), str(corpus), str(trained), own)
        losses[level] = [r["loss"] for r in metrics(tmp_path / level)]
    # bf16 keeps three digits; freshly made weights would differ by more than one
    assert losses["O2"] == pytest.approx(losses["O0"], abs=0.05)


def test_early_stopping_keeps_the_numbers_of_its_last_period(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    own = ["train.log_period=20", "train.train_iter=40", "train.evaluation.eval_period=1", "optim.lr=0"]
    found = ranks(1, run, str(tmp_path), str(corpus), [*own, "train.early_stopping.patience=2"])[0]
    assert found["finished"] and found["step"] == 3
    assert [r["step"] for r in metrics(tmp_path)] == [3]


def test_an_empty_validation_split_is_said(trained: Path, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    ranks(1, run, str(tmp_path), str(corpus), ["dataloader.split=[1,0,0]", "train.train_iter=1"])
    assert "the validation split is empty" in (tmp_path / "log.txt").read_text()


def test_eval_measures_what_the_run_measures(trained: Path) -> None:
    done = dufu(
        "eval", str(trained), "train.evaluation.evaluator=[{_target_:top_k,topk:[1,5]}]", "train.evaluation.eval_iter=1", "--json"
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert any("5" in name for name in record) and record["samples"] <= 32


ONE_BAD_SAMPLE = """
from dufu.data import CausalLMDataset
from dufu.errors import DataError

class Bad(CausalLMDataset):
    def __getitem__(self, index):
        if self.start > 0 and index == len(self) - 1:  # the last sample of any split but the first, which one rank holds
            raise DataError("the sample cannot be read")
        return super().__getitem__(index)
"""


def test_a_sample_that_one_rank_cannot_read_ends_an_averaged_evaluation(corpus: Path, tmp_path: Path) -> None:
    """That rank must not wait for the others while it puts its weights back."""
    (tmp_path / "bad_sample.py").write_text(ONE_BAD_SAMPLE)
    own = [
        "train.ema.enabled=true",
        "train.zero_optimization.enabled=true",
        f"train.output_dir={tmp_path}/run",
        "train.train_iter=1",
    ]
    bad = ["dataloader.dataset._target_=bad_sample.Bad", "--trust", "bad_sample", "--nproc", "2"]
    done = dufu("train", "gpt2_tiny", "--data", str(corpus), *TINY, *own, *bad, env={"PYTHONPATH": str(tmp_path)}, timeout=120)
    assert done.returncode == 2 and "error: the sample cannot be read" in done.stderr, done.stderr


def test_a_classifier_can_be_measured_by_scoring_metrics() -> None:
    model = BertClassifier(
        num_labels=3, vocab_size=20, hidden_layers=1, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, max_seq_length=6
    ).eval()
    batch = Batch(torch.ones(4, 6, dtype=torch.int64), extra={"sentence_labels": torch.tensor([0, -100, 2, 1])})
    ((scores, labels),) = scored_pairs(model, model.objectives, model.prepare(batch)).values()
    assert scores.shape == (3, 3) and labels.tolist() == [0, 2, 1]  # what is not scored is left out


def joined_twice(folder: str, corpus: str) -> list[int]:
    from dufu import train

    return [
        train("gpt2_tiny", [*TINY, f"train.output_dir={folder}/{n}", "train.train_iter=1"], data=[corpus]).step for n in range(2)
    ]


def test_a_process_may_join_a_second_group(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    assert ranks(2, joined_twice, str(tmp_path), str(corpus)) == [[1, 1], [1, 1]]


def test_torch_optimizers_that_go_element_by_element_are_taken(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    found = ranks(2, run, str(tmp_path), str(corpus), ["optim=torch.optim.RMSprop", "train.zero_optimization.enabled=true"])
    assert found[0].get("step") == 6, found
