"""`dufu train` as a user types it: statuses, one line for a mistake, options that take several files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dufu.cli.main import run, spread
from tests.small import TINY, dufu, metrics

MISTAKES = {
    "recipe": (["gpt2_tinny"], 'no recipe is called "gpt2_tinny"; did you mean "gpt2_tiny"'),
    "file": (["gpt2_tiny", "--data", "/nowhere/x.txt"], "/nowhere/x.txt"),
    "no-data": (["gpt2_tiny"], "give files with --data"),
    "key": (["gpt2_tiny", "train.train_itr=3"], "train_itr"),
    "layout": (["gpt2_tiny", "train.dist.tensor_parallel_size=3"], "3"),
    "option": (["gpt2_tiny", "--resum"], "--resum"),
    "resume-nothing": (["/nowhere/run", "--resume"], "/nowhere/run"),
    "keep": (["gpt2_tiny", "--data", "CORPUS", "train.checkpointer.max_to_keep=0"], "train.checkpointer.max_to_keep=0: at least 1"),
    "micro": (["gpt2_tiny", "--data", "CORPUS", "train.train_micro_batch_size=3", "train.num_accumulation_steps=2"], "= 6"),
    "evaluator": (["gpt2_tiny", "--data", "CORPUS", "train.evaluation.evaluator=acuracy"], 'did you mean "accuracy"'),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    case: str, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, said = MISTAKES[case]
    given = [str(corpus) if a == "CORPUS" else a for a in arguments]
    assert run(["train", *given]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("file", "file/inside"):
        assert run(["train", "gpt2_tiny", "--data", str(corpus), *TINY, f"train.output_dir={tmp_path}/{name}"]) == 2
        assert capfd.readouterr().err.startswith("error: train.output_dir=")
    assert (tmp_path / "file").read_text() == "mine"


def test_traceback_shows_where(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "gpt2_tinny", "--traceback"]) == 2
    err = capfd.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith("error: no recipe")


def test_a_mistake_that_workers_find_is_told_once(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    done = dufu("train", "gpt2_tiny", "--data", str(empty), "--nproc", "2", f"train.output_dir={tmp_path}/run")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "empty.txt" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_mistake_that_the_launcher_finds_starts_nobody(corpus: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(corpus), "--nproc", "2", "train.dist.tensor_parallel_size=4", f"train.output_dir={tmp_path}/run"]
    done = dufu("train", "gpt2_tiny", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_several_files_after_one_option(corpus: Path, tmp_path: Path) -> None:
    assert spread(["x", "--data", "a.txt", "b.txt", "k=1"]) == ["x", "--data", "a.txt", "--data", "b.txt", "k=1"]
    second = tmp_path / "second.txt"
    second.write_text("\n".join(f"line {i} of another file, long enough to be a document" for i in range(40)) + "\n")
    own = [*TINY, f"train.output_dir={tmp_path}/run", "train.train_iter=2"]
    assert run(["train", "gpt2_tiny", "--data", str(corpus), str(second), *own]) == 0
    assert [r["step"] for r in metrics(tmp_path / "run")] == [1, 2]
    assert run(["train", "gpt2_tiny", "--data", str(corpus), str(second), *own]) == 2  # it holds a run
    assert run(["train", "gpt2_tiny", "--data", str(corpus), str(second), *own, "train.overwrite=true"]) == 0
    assert run(["train", f"{tmp_path}/run", "--eval-only"]) == 0
