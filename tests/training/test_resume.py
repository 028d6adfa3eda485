"""Any run continues from its checkpoint exactly: to the last bit in the same layout, within rounding in another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dufu.config.schema import defaults
from tests.pool import Ranks
from tests.small import metrics
from tests.training.trials import again, one_epoch_of_24_samples, run, steps

# Dropout on, two micro-batches a step, three steps an epoch; a logging period that no checkpoint below falls on.
LONG = ["train.train_iter=11", "train.log_period=4", "train.num_accumulation_steps=2", "dataloader.split=[1.0]"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_epoch_of_24_samples(tmp_path_factory.mktemp("text") / "a.txt")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [*metrics(folder), *metrics(folder, "valid")]


@pytest.mark.parametrize(
    ("size", "layout", "stops"),
    [
        # within a period; at an epoch's end; within an epoch; at another epoch's end; one step before the end
        (1, [], [2, 3, 5, 6, 10]),
        (2, [], [3, 5]),
        (2, ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"], [5]),
        (2, ["train.dist.tensor_parallel_size=2"], [6]),
        (2, ["train.dist.pipeline_parallel_size=2"], [3, 5]),
        (2, ["train.dist.context_parallel_size=2"], [6]),
    ],
    ids=["one", "dp2", "zero3", "tp2", "pp2", "cp2"],
)
def test_resume_is_bit_equal(size: int, layout: list[str], stops: list[int], ranks: Ranks, text: Path, tmp_path: Path) -> None:
    valid = [*LONG, *layout, f"dataloader.valid_data=[{text}]", "train.evaluation.eval_period=5"]
    ranks(size, run, str(tmp_path / "whole"), str(text), valid)
    assert "24 samples" in (tmp_path / "whole" / "log.txt").read_text()
    for number, stop in enumerate([*stops, None]):
        ended = [] if stop is None else [f"train.stop_at_step={stop}"]
        found = ranks(size, run, str(tmp_path / "parts"), str(text), [*valid, *ended], {"resume": number > 0})[0]
        assert found["step"] == (stop or 11)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert [r["step"] for r in metrics(tmp_path / "whole")] == [4, 8, 11]
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def weights(folder: Path) -> dict[str, Any]:
    from dufu.training.checkpoint import latest_checkpoint

    found = latest_checkpoint(folder / "checkpoints")
    assert found is not None
    manifest = json.loads((found / "manifest.json").read_text())["files"]
    return {name: value["sha256"] for name, value in manifest.items() if name.endswith(".safetensors")}


def test_another_layout_continues_the_same_curve(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    zero3 = ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"]
    tp2 = ["train.dist.tensor_parallel_size=2"]
    long = [o for o in LONG if "log_period" not in o]
    ranks(1, run, str(tmp_path / "whole"), str(text), [*long, "train.log_period=3"])
    pp2, cp2 = ["train.dist.pipeline_parallel_size=2"], ["train.dist.context_parallel_size=2"]
    stages = [(4, tp2, 2), (1, [], 3), (2, zero3, 4), (3, [], 6), (4, [*zero3, *pp2], 8), (2, cp2, 9), (4, [*zero3, *tp2], 11)]
    for number, (size, layout, stop) in enumerate(stages):
        whole = [*defaults("train.dist"), *defaults("train.zero_optimization")]
        given = [*long, "train.log_period=3", *whole, *layout, f"train.stop_at_step={stop}"]
        ranks(size, run, str(tmp_path / "parts"), str(text), given, {"resume": number > 0})
    one, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [r["step"] for r in parts] == [3, 6, 9, 11]
    for a, b in zip(one, parts):
        # fp32 sums in another order, growing slowly over the steps
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert (b["tokens"], b["samples"], b["lr"]) == (a["tokens"], a["samples"], a["lr"])


def test_accumulation_that_the_new_shares_do_not_make_follows_from_them(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    # Ten samples are 3 + 3 + 3 + 1; the five that each of two processes has make three micro-batches or five, but not four.
    ten = ["train.global_batch_size=10", "train.num_accumulation_steps=4", "train.train_iter=4", "train.evaluation.enabled=false"]
    ranks(1, run, str(tmp_path / "whole"), str(text), ten)
    ranks(1, run, str(tmp_path / "parts"), str(text), [*ten, "train.stop_at_step=2"])
    found = ranks(2, again, str(tmp_path / "parts"), [])
    assert [f.get("error") for f in found] == [None, None]
    for a, b in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6) and b["tokens"] == a["tokens"]
    error = ranks(2, run, str(tmp_path / "x"), str(text), ten)[0]["error"]
    assert "num_accumulation_steps=4: the 5 of 10 samples" in error and "3 or 5 would do" in error


def count_steps(folder: str, corpus: str, overrides: list[str], resume: bool) -> tuple[int, list[int]]:
    from dufu.training.hooks import Hook
    from dufu.training.run import train
    from tests.small import TINY

    class Counter(Hook):
        count = 0
        items: list[int] = []  # noqa: RUF012

        def before_step(self, trainer: Any) -> None:
            numbers = trainer.batches.feed.step_numbers(trainer.consumed)
            self.items = [*self.items, *(int(i) for i in trainer.batches.feed.items(numbers)[0])]

        def after_step(self, trainer: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    hook = Counter()
    train("gpt2_tiny", [*TINY, f"train.output_dir={folder}", *overrides], data=[corpus], resume=resume, hooks=[hook])
    return hook.count, hook.items


def test_each_sample_once_an_epoch_and_hooks_keep_their_state(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    short = ["dataloader.split=[1.0]", "train.train_iter=9"]
    first, items = ranks(1, count_steps, str(tmp_path), str(text), [*short, "train.stop_at_step=5"], False)[0]
    last, more = ranks(1, count_steps, str(tmp_path), str(text), short, True)[0]
    assert (first, last) == (5, 9)
    dealt = [*items, *more]
    for epoch in range(3):
        assert sorted(dealt[epoch * 24 : (epoch + 1) * 24]) == list(range(24))
    assert dealt[:24] != dealt[24:48]


def test_learning_rates_do_not_shift(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    short = ["train.train_iter=8", "train.warmup_ratio=0.4", "dataloader.split=[1.0]"]
    ranks(1, run, str(tmp_path / "whole"), str(text), short)
    for number in range(1, 9):
        ranks(1, run, str(tmp_path / "parts"), str(text), [*short, f"train.stop_at_step={number}"], {"resume": number > 1})
    assert [r["lr"] for r in metrics(tmp_path / "parts")] == [r["lr"] for r in metrics(tmp_path / "whole")]


def test_the_run_s_folder_is_enough(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    short = ["train.train_iter=4", "dataloader.split=[1.0]", "train.stop_at_step=2", "train.num_accumulation_steps=2"]
    short += ["train.train_micro_batch_size=4"]
    ranks(1, run, str(tmp_path / "run"), str(text), short)
    # The saved stop_at_step belonged to the first call; the saved accumulation to its layout.
    assert ranks(2, again, str(tmp_path / "run"), ["train.stop_at_step=3"])[0]["step"] == 3
    assert ranks(1, again, str(tmp_path / "run"), [])[0] == {"step": 4, "finished": True, "metrics": {}}
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert ranks(1, again, str(tmp_path / "run"), [])[0]["step"] == 4
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert "the run is finished: 4 of 4 steps" in (tmp_path / "run" / "log.txt").read_text()
    assert ranks(1, again, str(tmp_path / "run"), ["train.train_iter=5"])[0]["step"] == 5
    assert [r["step"] for r in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_a_folder_without_a_checkpoint_starts_from_the_beginning(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    short = ["train.train_iter=2", "dataloader.split=[1.0]"]
    (tmp_path / "checkpoints" / "step_0000001.part").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "lo')
    assert ranks(1, run, str(tmp_path), str(text), short, {"resume": True})[0]["step"] == 2
    assert "holds no checkpoint to resume from; starting from the beginning" in (tmp_path / "log.txt").read_text()
    assert [r["step"] for r in metrics(tmp_path)] == [1, 2]
    assert steps(tmp_path) == ["step_0000002"]


def test_what_would_change_the_numbers_is_refused_by_name(ranks: Ranks, text: Path, corpus: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    ranks(1, run, folder, str(text), ["train.stop_at_step=2", "dataloader.split=[1.0]"])
    state = sorted((p, p.stat().st_mtime_ns) for p in Path(folder).rglob("*"))

    def refused(overrides: list[str], data: Path = text, **options: Any) -> str:
        given = ["dataloader.split=[1.0]", *overrides]
        answer = ranks(1, run, folder, str(data), given, {"resume": True, **options})[0]
        assert sorted((p, p.stat().st_mtime_ns) for p in Path(folder).rglob("*")) == state  # refusing touches nothing
        return str(answer["error"])

    assert "optim.lr was 0.0003, is now 0.5" in refused(["optim.lr=0.5"])
    assert "train.global_batch_size was 8, is now 4" in refused(["train.global_batch_size=4"])
    assert "model.cfg.hidden_layers was 2, is now 3" in refused(["model.cfg.hidden_layers=3"])
    assert "train.seed was 1234, is now 5" in refused(["train.seed=5"])
    assert "the training data or their order differ" in refused([], data=corpus)
    assert "not a key that is compared" in refused([], allow_change=["train.output_dir"])
    fresh = run_refused(ranks, folder, text)
    assert "already holds a run; continue it with --resume" in fresh
    options = {"resume": True, "allow_change": ["optim.lr", "dataloader.data"]}
    assert ranks(1, run, folder, str(corpus), ["dataloader.split=[1.0]", "optim.lr=0.5"], options)[0]["step"] == 6


def run_refused(ranks: Ranks, folder: str, text: Path) -> str:
    return str(ranks(1, run, folder, str(text), ["dataloader.split=[1.0]"])[0]["error"])


def test_another_optimizer_begins_without_state_where_that_is_allowed(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    short = ["dataloader.split=[1.0]", "train.train_iter=3"]
    ranks(1, run, str(tmp_path), str(text), [*short, "train.stop_at_step=2"])
    other = [*short, "optim._target_=dufu.optim.Adam"]
    options = {"resume": True, "allow_change": ["optim"]}
    assert ranks(1, run, str(tmp_path), str(text), other, options)[0] == {"step": 3, "finished": True, "metrics": {}}


def killed_while_training(folder: str, corpus: str, overrides: list[str], kills: int) -> list[int]:
    """Kill a training process `kills` times at random moments, each time resuming; return the lines it had written by then."""
    import os
    import random
    import signal
    import time

    path, chance, seen = Path(folder) / "metrics.jsonl", random.Random(6), []
    for _ in range(kills):
        before = path.read_bytes().count(b"\n") if path.exists() else 0
        child = os.fork()
        if child == 0:
            os._exit(0 if run(folder, corpus, overrides, {"resume": True}).get("step") else 1)
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if path.exists() and path.read_bytes().count(b"\n") > before + 2:
                time.sleep(chance.random() * 0.05)
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
        seen.append(path.read_bytes().count(b"\n"))
    return seen


def test_runs_killed_at_random_moments_read_like_one_undisturbed(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    own = ["train.train_iter=60", "train.checkpointer.period=3", "train.evaluation.eval_period=10", "train.num_accumulation_steps=2",
           "train.log_period=2"]  # fmt: skip
    ranks(1, run, str(tmp_path / "whole"), str(corpus), own)
    seen = ranks(1, killed_while_training, str(tmp_path / "parts"), str(corpus), own, 5)[0]
    assert seen[0] < 30  # it was killed under way
    assert ranks(1, run, str(tmp_path / "parts"), str(corpus), own, {"resume": True})[0]["step"] == 60
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
