"""What a run shows and writes: metrics.jsonl, the console, the picture; and that it holds on to nothing."""

from __future__ import annotations

import json
import os
import pty
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dufu.training.picture import draw_losses
from dufu.training.sink import Sink, eta, trim_metrics
from tests.pool import Ranks
from tests.small import dufu, metrics
from tests.training.trials import run


def test_a_thousand_steps_to_a_file_are_a_line_a_period(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sink = Sink(tmp_path, tensorboard=False)
    sink.start_progress(0, 1000)
    for step in range(1, 1001):
        sink.progress(step)
        if step % 100 == 0:
            sink.say(f"step {step}")
    sink.close()
    out = capfd.readouterr().out
    assert "\r" not in out and "\x1b" not in out
    assert out.splitlines() == [f"step {s}" for s in range(100, 1001, 100)]
    assert (tmp_path / "log.txt").read_text().count("\n") == 10


def test_a_terminal_gets_a_bar_and_the_lines(tmp_path: Path) -> None:
    main, terminal = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(main, 4096):
                seen.append(data)
        except OSError:
            pass  # the terminal was closed

    reader = threading.Thread(target=read)
    reader.start()
    before = sys.stdout
    with os.fdopen(terminal, "w") as sys.stdout:
        try:
            sink = Sink(tmp_path, tensorboard=False)
            sink.start_progress(3, 10)
            sink.say("step 4  loss [1.0]")
            sink.progress(4)
            sink.close()
        finally:
            screen, sys.stdout = sys.stdout, before
            screen.flush()
    reader.join(10)
    os.close(main)
    text = b"".join(seen).decode()
    assert "step 4  loss [1.0]" in text and "3/10" in text and "\x1b" in text
    assert "\x1b" not in (tmp_path / "log.txt").read_text()


def test_whoever_stops_reading_does_not_stop_the_run(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    before = sys.stdout
    sys.stdout = os.fdopen(writing, "w")
    try:
        sink = Sink(tmp_path, tensorboard=False)
        sink.say("one")
        sink.say("two")
        sink.close()
    finally:
        broken, sys.stdout = sys.stdout, before
        with pytest.raises(BrokenPipeError):
            broken.close()
    assert (tmp_path / "log.txt").read_text().count("\n") == 2


def test_lines_past_a_step_and_torn_ones_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1.0}\n{"step": 3, "loss": 1.0}\n{"step": 2, "lo')
    trim_metrics(path, 2)
    assert path.read_text() == '{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1.0}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_the_picture_holds_both_curves(tmp_path: Path) -> None:
    lines = [{"step": s, "loss": 5.0 / s} for s in range(1, 5)] + [{"step": 2, "loss": float("nan")}]
    lines += [{"step": 4, "loss": 2.0, "split": "valid"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    path = draw_losses(tmp_path)
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "metrics.jsonl").write_text("")
    assert draw_losses(tmp_path) is None


def test_remaining_times() -> None:
    assert [eta(3600, 2.5), eta(0, 1.0), eta(10, float("nan"))] == ["2:30:00", "0:00:00", "?"]


def test_a_run_s_folder(corpus: Path, tmp_path: Path) -> None:
    own = ["train.train_iter=4", "train.log_period=2", "train.evaluation.eval_period=2", "train.tensorboard=true"]
    arguments = [
        "gpt2_tiny",
        "--data",
        str(corpus),
        "--nproc",
        "2",
        f"train.output_dir={tmp_path}/run",
        "model.cfg.hidden_size=32",
        *own,
    ]
    done = dufu("train", *arguments, env={"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "run"
    names = {"checkpoints", "config.yaml", "log.txt", "loss.png", "metrics.jsonl", "tensorboard", "tokenizer"}
    assert {p.name for p in folder.iterdir()} == names
    # One process prints, once a line, what it writes to the log.
    printed = done.stdout.splitlines()
    assert [line for line in printed if line.startswith("step 2/4")] == [printed[1]]
    assert printed == [line.split(" ", 2)[2] for line in (folder / "log.txt").read_text().splitlines()]
    assert "left 0:00:0" in printed[1]
    keys = ["step", "loss", "grad_norm", "lr", "tokens", "samples", "tokens_per_second", "step_seconds"]
    assert list(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0]))[:8] == keys

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [2, 4]
    assert [e.value for e in events.Scalars("valid/loss")] == pytest.approx([r["loss"] for r in metrics(folder, "valid")])


def speeds(folder: str, corpus: str, resume: bool, stop: int) -> list[tuple[float, float]]:
    """Return (tokens a second, tokens by the clock) of each period that this process wrote."""
    import time

    from dufu.training.hooks import Hook
    from dufu.training.run import train
    from tests.small import TINY

    spent: list[float] = []

    class Watch(Hook):
        def before_step(self, trainer: Any) -> None:
            self.began = time.perf_counter()

        def after_step(self, trainer: Any) -> None:
            spent.append(time.perf_counter() - self.began)

    own = ["train.log_period=3", f"train.stop_at_step={stop}", "train.train_iter=9", "train.evaluation.enabled=false"]
    train("gpt2_tiny", [*TINY, f"train.output_dir={folder}", *own], data=[corpus], resume=resume, hooks=[Watch()])
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [(records[-1]["tokens_per_second"], records[-1]["tokens"]), (len(spent), sum(spent))]


def test_speed_after_a_resume_is_that_of_this_process(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    ranks(1, speeds, str(tmp_path), str(corpus), False, 4)
    (speed, tokens), (count, seconds) = ranks(1, speeds, str(tmp_path), str(corpus), True, 6)[0]
    # Step 4 belongs to the first process: its tokens are in the period's total, not in this process's speed.
    assert (tokens, count) == (3 * 8 * 24, 2)
    assert speed == pytest.approx(2 * 8 * 24 / seconds, rel=0.2)
    assert metrics(tmp_path)[-1]["samples"] == 48


def living(folder: str, corpus: str) -> dict[int, tuple[int, int]]:
    """Return, at steps 20 and 300, the number of living tensors and this process's memory in bytes."""
    import gc
    import resource

    import torch

    from dufu.training.hooks import Hook
    from dufu.training.run import train
    from tests.small import TINY

    seen: dict[int, tuple[int, int]] = {}

    class Count(Hook):
        def after_step(self, trainer: Any) -> None:
            if trainer.step in (20, 300):
                gc.collect()
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                seen[trainer.step] = (
                    sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()),
                    pages * resource.getpagesize(),
                )

    own = ["train.train_iter=300", "train.log_period=100", "train.evaluation.enabled=false", "train.global_batch_size=2"]
    train("gpt2_tiny", [*TINY, f"train.output_dir={folder}", *own], data=[corpus], hooks=[Count()])
    return seen


def test_memory_does_not_grow_with_steps(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    seen = ranks(1, living, str(tmp_path), str(corpus))[0]
    (tensors, memory), (later, more) = seen[20], seen[300]
    assert later <= tensors  # at the last step no batch is read ahead
    assert more < 1.01 * memory


def test_a_trial_run_is_short(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    own = ["train.train_iter=5000", "train.log_period=100"]
    for _ in range(2):  # a trial replaces the one before, and leaves the run's own folder free
        assert ranks(1, run, str(tmp_path), str(corpus), own, {"fast_dev_run": True})[0]["step"] == 20
    trial = tmp_path / "fast_dev_run"
    assert [r["step"] for r in metrics(trial)] == list(range(1, 21))
    assert [r["step"] for r in metrics(trial, "valid")] == [10, 20]
    assert ranks(1, run, str(tmp_path), str(corpus), ["train.train_iter=1"])[0]["step"] == 1


def test_time_ends_a_run_early_with_a_checkpoint(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    found = ranks(2, run, str(tmp_path), str(corpus), ["train.train_iter=100000", "train.stop_after=1s"])
    assert found[0]["step"] == found[1]["step"] < 100000 and not found[0]["finished"]
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"step_{found[0]['step']:07d}"
    assert "50 fortnights" in ranks(1, run, str(tmp_path / "x"), str(corpus), ["train.stop_after=50 fortnights"])[0]["error"]
    assert not (tmp_path / "x").exists()
