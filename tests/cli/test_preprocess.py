"""`dufu preprocess` as a user types it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dufu.cli.main import run
from dufu.data import IndexedTokens, load_tokenizer


def outputs(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("x"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_text_and_json_lines_together(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.txt").write_text("one\n\ntwo\n")
    (here / "b.jsonl").write_text('{"body": "three"}\n{"text": "four"}\n')
    assert run(["preprocess", "a.txt", "b.jsonl", "--text-key", "body", "--out", "sub/x", "--no-append-eod"]) == 0
    said = capsys.readouterr()
    assert said.out == 'sub/x.bin, sub/x.idx: 3 documents, 11 tokens; left out: 1 empty, 1 no text field "body"\n'
    assert said.err == ""  # progress is for terminals only
    assert IndexedTokens("sub/x").lengths.tolist() == [3, 3, 5]


def test_a_learnt_tokenizer_lies_beside_and_is_used(here: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preprocess", str(corpus), "--train-tokenizer", "400", "--out", "x"]) == 0
    tokenizer = load_tokenizer("x.tokenizer/tokenizer.json")
    assert tokenizer.vocab_size == 400
    note = json.loads(Path("x.json").read_text())
    assert note["tokenizer"] == {"source": "x.tokenizer", "fingerprint": tokenizer.fingerprint, "vocab_size": 400}
    assert tokenizer.decode(IndexedTokens("x").get(0)) == corpus.read_text().split("\n")[0]
    assert outputs(here) == ["x.bin", "x.idx", "x.json", "x.tokenizer"]
    assert run(["preprocess", str(corpus), "--train-tokenizer", "400", "--out", "y", "--tokenizer-out", "x.tokenizer"]) == 2
    assert "holds a tokenizer already" in capsys.readouterr().err


def test_the_vocabulary_decides_the_width(here: Path, corpus: Path) -> None:
    Path("vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n" + "".join(f"w{i}\n" for i in range(66_000)) + "the\n")
    assert run(["preprocess", str(corpus), "--tokenizer", "vocab.txt", "--out", "x"]) == 0
    tokens = IndexedTokens("x")
    assert tokens.dtype == "int32" and 66_005 in tokens.tokens


BAD = [
    (["a.txt", "none.txt"], "none.txt: no such file"),
    (["empty.txt"], "empty.txt: no document in it (the file is empty)"),
    (["blank.txt"], "blank.txt: no document in it (left out: 2 empty)"),
    (["bad.txt"], "bad.txt:2: not UTF-8 (byte 0xFF at column 1); convert the file, or choose --errors skip or replace"),
    (["bad.txt", "--errors", "ignore"], 'errors="ignore": one of strict, skip, replace'),
    (["a.txt", "--documents", "blank_lines"], 'documents="blank_lines": one of lines, blank-lines; did you mean "blank-lines"?'),
    (["fields.jsonl"], 'fields.jsonl: no document in it (left out: 1 no text field "text")'),
    (["broken.jsonl"], "broken.jsonl:1: not JSON"),
    (["a.txt", "--tokenizer", "nowhere"], 'tokenizer "nowhere": no such file'),
    (["a.txt", "--tokenizer", "bytes", "--train-tokenizer", "300"], "give one of them"),
    (["a.txt", "--train-tokenizer", "100"], "--train-tokenizer 100: at least 261"),
    (["a.txt", "--tokenizer-out", "t"], "only together with --train-tokenizer"),
    (["."], ".: is a folder; name the files in it"),
    (["/dev/null", "--train-tokenizer", "300"], "/dev/null: is no regular file, but is read 2 times"),
    (["a.txt", "--workers", "0"], "--workers 0: at least 1"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[m for _, m in BAD])
def test_a_mistake_is_one_line_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    files = {
        "a.txt": b"a\n", "empty.txt": b"", "blank.txt": b"\n \n", "bad.txt": b"a\n\xff\n", "fields.jsonl": b'{"x": "y"}\n', "broken.jsonl": b"{\n",
    }  # fmt: skip
    for name, content in files.items():
        (here / name).write_bytes(content)
    assert run(["preprocess", *arguments, "--out", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert outputs(here) == []


def test_replaced_lines_are_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "bad.txt").write_bytes(b"a\n\xff\nb\n")
    assert run(["preprocess", "bad.txt", "--out", "x", "--errors", "replace"]) == 0
    assert "3 documents" in (said := capsys.readouterr().out) and "lines with bytes replaced: 1" in said


def test_output_that_is_there_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.txt").write_text("a\n")
    assert run(["preprocess", "a.txt", "--out", "x"]) == 0
    assert run(["preprocess", "a.txt", "--out", "x"]) == 2
    assert "x.bin, x.idx, x.json: exists already" in capsys.readouterr().err
    assert run(["preprocess", "a.txt", "--out", "x", "--overwrite"]) == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_signal_ends_it_in_order(here: Path, number: signal.Signals, status: int, workers: str) -> None:
    """The text comes through a pipe that never ends, so the signal certainly arrives in the middle."""
    os.mkfifo("a.txt")
    command = [sys.executable, "-m", "dufu.cli.main", "preprocess", "a.txt", "--out", "x", "--workers", workers]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with open("a.txt", "wb", buffering=0) as pipe:
        while not Path("x.bin.part").exists():
            pipe.write(b"some text that is long enough\n" * 1000)
        for _ in range(20):
            pipe.write(b"some text that is long enough\n" * 1000)
        process.send_signal(number)
        process.stderr.read()  # type: ignore[union-attr]
        assert process.wait(30) == status
    assert outputs(here) == []


def test_a_terminal_shows_progress(here: Path) -> None:
    (here / "a.txt").write_bytes(b"some text that is long enough\n" * 100_000)
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "dufu.cli.main", "preprocess", "a.txt", "--out", "x"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=slave, text=True, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)
    assert process.wait(60) == 0
    assert b"documents" in shown and b"/3.0 MB" in shown
