"""A step whose numbers are not finite is explained, kept, and made again in one process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.training.checkpoint import CheckpointReader
from tests.pool import Ranks
from tests.small import TINY, dufu

SMALL = [*TINY, "train.evaluation.enabled=false", "train.checkpointer.period=2"]


def stopped(folder: str, corpus: str, how: str, overrides: list[str]) -> tuple[str, int]:
    """Train with finite weights that overflow in step 4; return the error and, for `how` "sample", the sample that meets them."""
    from dufu.errors import DufuError
    from dufu.training.hooks import Hook
    from dufu.training.run import train

    found = [-1]

    def fill(trainer: Any, name: str, value: float, row: int | None = None) -> None:
        store = trainer.train_step.distributed.store
        for entry in store.entries:
            for piece in entry.pieces:
                if piece.info.name == name:
                    with torch.no_grad():
                        values = entry.tensor.view(-1)[piece.start : piece.start + piece.length]
                        (values if row is None else values.view(-1, 32)[row]).fill_(value)
        store.publish()

    class Poison(Hook):
        def before_step(self, trainer: Any) -> None:
            if trainer.step != 3:
                return
            if how == "sample":
                feed = trainer.batches.feed
                numbers = feed.step_numbers(trainer.consumed)
                tokens = [set(s["input_ids"].tolist()) for s in feed.load(numbers)]
                lonely = next((t, n) for n, own in enumerate(tokens) for t in sorted(own) if sum(t in o for o in tokens) == 1)
                found[0] = int(numbers[lonely[1]])
                # What dropout keeps it multiplies by 1.11, which is past the largest float32.
                fill(trainer, "embedding.word.weight", 3.3e38, lonely[0])
            elif how == "backward":
                # Finite forward; backward multiplies the infinite slope of the root at zero by zero.
                unit = trainer.train_step.distributed.model.units()["layers.1"]
                unit.register_forward_hook(lambda module, inputs, output: output + torch.sqrt(output * 0))
            else:
                names = [i.name for i in trainer.train_step.distributed.infos]
                fill(trainer, next(n for n in names if n.startswith("layers.1.") and "mlp" in n and n.endswith("weight")), 3e38)

    try:
        train("gpt2_tiny", [*SMALL, f"train.output_dir={folder}", *overrides], data=[corpus], hooks=[Poison()])
    except DufuError as error:
        return str(error), found[0]
    return "", found[0]


LAYOUTS = [
    (1, []),
    (2, []),
    (2, ["train.dist.pipeline_parallel_size=2", "train.train_micro_batch_size=2"]),
    (2, ["train.num_accumulation_steps=2", "train.activation_checkpoint.enabled=true"]),
]


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_the_sample_that_overflows_is_named_and_made_again(
    size: int, layout: list[str], ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    answers = ranks(size, stopped, str(tmp_path), str(corpus), "sample", layout)
    assert len({error for error, _ in answers}) == 1
    error, sample = answers[0]
    assert error.startswith("step 4: the gradient norm is nan; the update was not made. The batch holds samples 24 to 31"), error
    assert f"First not finite: unit embedding: its output is not finite in forward (samples {sample})." in error, error
    kept = tmp_path / "nonfinite" / "step_0000004"
    assert f"dufu train --replay {kept}" in error
    assert CheckpointReader(kept).state["step"] == 3
    assert json.loads((kept / "replay.json").read_text())["micro_batch"] == (
        2 if "pipeline" in str(layout) else 8 // size // (2 if "accum" in str(layout) else 1)
    )
    done = dufu("train", "--replay", str(kept))
    assert done.returncode == 0, done.stderr
    assert "loss nan, gradient norm nan" in done.stdout
    assert f"first not finite: unit embedding: its output is not finite in forward (samples {sample})" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("size", "layout"),
    [(2, ["train.dist.tensor_parallel_size=2"]), (2, ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"])],
)
def test_the_unit_and_the_module_that_overflow_are_named(
    size: int, layout: list[str], ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    error = ranks(size, stopped, str(tmp_path), str(corpus), "unit", layout)[0][0]
    assert "First not finite: unit layers.1: its output is not finite in forward" in error, error
    done = dufu("train", "--replay", str(tmp_path / "nonfinite" / "step_0000004"))
    assert done.returncode == 0, done.stderr
    assert "first not finite: unit layers.1: its output is not finite in forward" in done.stdout
    assert re.search(r"first module whose output is not finite: layers\.1\.\S*mlp", done.stdout), done.stdout


def test_a_unit_whose_backward_alone_fails_is_named(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    error = ranks(2, stopped, str(tmp_path), str(corpus), "backward", [])[0][0]
    first = "unit layers.1: the gradient that it hands back is not finite in backward (samples 24, 25, 26, 27)"
    assert f"First not finite: {first}." in error, error
    done = dufu("train", "--replay", str(tmp_path / "nonfinite" / "step_0000004"))  # without what the hook did
    assert done.returncode == 0 and "every unit's output and gradient is finite here" in done.stdout, done.stderr
    assert f"in the run, first not finite: {first}" in done.stdout


def test_nothing_to_replay_is_one_line(corpus: Path, ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, stopped, str(tmp_path), str(corpus), "unit", [])
    done = dufu("train", "--replay", str(tmp_path))
    assert done.returncode == 2 and done.stderr.startswith("error: --replay") and "there is" in done.stderr
    assert str(tmp_path / "nonfinite" / "step_0000004") in done.stderr
    done = dufu("train", "gpt2_tiny", "--replay", str(tmp_path))
    assert done.returncode == 2 and "from the folder alone" in done.stderr
    # The run itself goes on from its checkpoint.
    done = dufu("train", str(tmp_path), "--resume")
    assert done.returncode == 0, done.stderr
