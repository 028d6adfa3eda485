"""t5_tiny as a user runs it: train, resume to the last bit, evaluate, answer, compare layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dufu.parity.check import check_config
from tests.pool import Ranks
from tests.small import TINY, metrics

SMALL = [*TINY, "model.cfg.head_size=8", "model.cfg.extra_ids=8"]


def train_t5(folder: str, corpus: str, overrides: list[str], resume: bool = False) -> int:
    from dufu.training.run import train

    return train("t5_tiny", [*SMALL, f"train.output_dir={folder}", *overrides], data=[corpus], resume=resume).step


@pytest.fixture(scope="module")
def folder(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t5") / "run"
    ranks(1, train_t5, str(path), str(corpus), ["train.train_iter=8", "optim.lr=3e-3", "train.evaluation.eval_period=8"])
    return path


def test_it_learns_and_is_evaluated(folder: Path) -> None:
    losses = [r["loss"] for r in metrics(folder)]
    assert len(losses) == 8 and losses[-1] < 0.97 * losses[0]
    (valid,) = metrics(folder, "valid")
    assert valid["tokens"] > 0 and 0 <= valid["accuracy"] <= 1


@pytest.mark.parametrize(
    ("size", "layout"),
    [(1, []), (2, ["train.dist.tensor_parallel_size=2"]), (2, ["train.dist.pipeline_parallel_size=2"])],
    ids=["one", "tp2", "pp2"],
)
def test_resume_is_bit_equal(size: int, layout: list[str], ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    options = [*layout, "train.num_accumulation_steps=2", "train.train_iter=5"]
    ranks(size, train_t5, str(tmp_path / "whole"), str(corpus), options)
    for number, stop in enumerate((2, 4, None)):
        ended = [] if stop is None else [f"train.stop_at_step={stop}"]
        ranks(size, train_t5, str(tmp_path / "parts"), str(corpus), [*options, *ended], number > 0)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole") and len(metrics(tmp_path / "whole")) == 5


def answers(folder: str, overrides: list[str]) -> list[list[int]]:
    from dufu.generation import TextGenerationPipeline

    found = TextGenerationPipeline(folder, overrides)(["The with statement", "for"], max_new_tokens=8, temperature=1.0, seed=2)
    assert all(each.is_answer and each.whole == each.text for each in found)
    return [each.tokens for each in found]


@pytest.mark.parametrize("overrides", [["train.dist.tensor_parallel_size=2"], ["train.dist.pipeline_parallel_size=2"], []])
def test_it_answers_alike_in_every_layout(overrides: list[str], folder: Path, ranks: Ranks) -> None:
    one = ranks(1, answers, str(folder), [])[0]
    assert all(part == one for part in ranks(2, answers, str(folder), overrides)) and any(one)


def test_check_proves_its_layouts_and_sees_the_decoders_units(corpus: Path, ranks: Ranks) -> None:
    report = check_config("t5_tiny", SMALL, layouts="tp2,pp2", steps=2, pool=ranks.pool)
    assert report.agrees, str(report)
    for finding in report.findings:
        units = {d.name for d in finding.comparison.forward}  # type: ignore[union-attr]
        assert {"encoder.layers.0", "decoder.layers.1"} <= units
        assert finding.witnesses[0]["bytes"] > 0


def test_transformers_answers_with_the_exported_folder_as_dufu_does(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from dufu.generation import TextGenerationPipeline
    from dufu.training.export_hf import export_folder

    export_folder(folder, tmp_path / "out")
    model, tokenizer = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    read = [*tokenizer("The with statement").input_ids, tokenizer.eos_token_id]  # as the bytes were trained
    written = model.generate(torch.tensor([read]), max_new_tokens=9, do_sample=False, suppress_tokens=list(range(261, 269)))
    (found,) = TextGenerationPipeline(folder)("The with statement", max_new_tokens=9)
    (again,) = TextGenerationPipeline(tmp_path / "out")("The with statement", max_new_tokens=9)
    assert found.tokens == again.tokens == [t for t in written[0, 1:].tolist() if t != tokenizer.eos_token_id]
    assert written[0, 0] == tokenizer.pad_token_id == model.config.decoder_start_token_id


def test_the_run_says_what_it_was_made_of(folder: Path) -> None:
    config = (folder / "config.yaml").read_text()
    assert "dufu.models.t5.T5" in config and "vocab_size: 261" in config and "extra_ids: 8" in config
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["tokens"] > 0
