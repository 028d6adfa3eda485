"""Text to token files: the same for any number of workers, whole or absent, in flat memory."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dufu.data import IndexedTokens, load_tokenizer
from dufu.data.preprocess import learn_tokenizer, preprocess
from dufu.errors import ConfigError, DataError
from tests.small import write_corpus

NAMES = ("x.bin", "x.idx", "x.json")


def text(folder: Path, content: bytes, name: str = "in.txt") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def outputs(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name.startswith("x.")}


def test_text_comes_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    made = preprocess([text(tmp_path, "héllo\n\n世界".encode())], tokenizer, tmp_path / "x")
    tokens = IndexedTokens(tmp_path / "x")
    assert tokens.document_count == made["documents"] == 2
    assert tokenizer.decode(tokens.get(0)) == "héllo" and tokenizer.decode(tokens.get(1)) == "世界"
    assert tokens.get(0)[-1] == tokens.get(1)[-1] == tokenizer.eod
    assert len(tokens.tokens) == made["tokens"] == 6 + 6 + 2


def test_the_note_says_what_made_the_tokens(tmp_path: Path) -> None:
    first, second = text(tmp_path, b"a\n\n"), text(tmp_path, b'{"text": "b"}\n{"x": 1}\n', "in.jsonl")
    preprocess([first, second], load_tokenizer("bytes"), tmp_path / "x", append_eod=False)
    note = json.loads((tmp_path / "x.json").read_text())
    assert note["inputs"] == [{"path": str(p), "sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in (first, second)]
    assert note["tokenizer"]["source"] == "bytes" and note["tokenizer"]["vocab_size"] == 261
    assert note["options"]["append_eod"] is False
    assert (note["documents"], note["tokens"]) == (2, 2)
    assert note["skipped"] == {"empty": 1, 'no text field "text"': 1}
    for suffix in ("bin", "idx"):
        assert note["content"][f"{suffix}_sha256"] == hashlib.sha256((tmp_path / f"x.{suffix}").read_bytes()).hexdigest()


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path) -> None:
    """Enough text for several batches, so that the order of their ends is not that of their beginnings."""
    write_corpus(tmp_path / "in.txt", 2000)
    content = (tmp_path / "in.txt").read_bytes() * 4
    files = [text(tmp_path, content), text(tmp_path, b"last\n", "in2.txt")]
    found = []
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        preprocess(files, load_tokenizer("bytes"), folder / "x", workers=workers, split_sentences=True)
        found.append(outputs(folder))
    assert set(found[0]) == set(NAMES)
    assert len(content) > 4 << 18
    assert found[0] == found[1] == found[2]


def test_sentences_become_sequences_of_their_document(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    made = preprocess([text(tmp_path, b"One. Two!\nThree.\n")], tokenizer, tmp_path / "x", split_sentences=True)
    tokens = IndexedTokens(tmp_path / "x")
    assert made["sequences"] == 3 and tokens.documents.tolist() == [0, 2, 3]
    assert [tokenizer.decode(tokens.get(i)) for i in range(3)] == ["One.", " Two!", "Three."]
    assert [int(tokens.get(i)[-1] == tokenizer.eod) for i in range(3)] == [0, 1, 1]


def test_splitting_sentences_changes_no_token_of_a_byte_level_bpe(corpus: Path, tmp_path: Path) -> None:
    """The white space between sentences goes to the second, as the tokenizer's own cutting would have it."""
    tokenizer = learn_tokenizer([corpus], 600, tmp_path / "t")
    for split in (False, True):
        preprocess([corpus], tokenizer, tmp_path / f"x{split}", split_sentences=split)
    assert (tmp_path / "xFalse.bin").read_bytes() == (tmp_path / "xTrue.bin").read_bytes()
    assert len(IndexedTokens(tmp_path / "xTrue")) > len(IndexedTokens(tmp_path / "xFalse"))


@pytest.mark.parametrize("content", [b"", b"\n \n\n"])
def test_no_document_is_an_error_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=r"in\.txt: no document in it"):
        preprocess([text(tmp_path, content)], load_tokenizer("bytes"), tmp_path / "x")
    assert not outputs(tmp_path)


def test_one_token_documents(tmp_path: Path) -> None:
    preprocess([text(tmp_path, b"a\nb\nc\n")], load_tokenizer("bytes"), tmp_path / "x", append_eod=False)
    assert IndexedTokens(tmp_path / "x").lengths.tolist() == [1, 1, 1]


def test_a_document_without_tokens_is_counted(tmp_path: Path) -> None:
    """A BERT tokenizer cleans control characters away."""
    vocabulary = text(tmp_path, b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n", "vocab.txt")
    made = preprocess([text(tmp_path, b"a\n\x07\na a\n")], load_tokenizer(vocabulary), tmp_path / "x")
    assert made["documents"] == 2 and made["skipped"] == {"no token": 1}


def test_existing_output_is_refused_and_replaced_only_on_request(tmp_path: Path) -> None:
    source = text(tmp_path, b"a\n")
    preprocess([source], load_tokenizer("bytes"), tmp_path / "x")
    before = outputs(tmp_path)
    source.write_bytes(b"bb\n")
    with pytest.raises(DataError, match=r"exists already.*--overwrite"):
        preprocess([source], load_tokenizer("bytes"), tmp_path / "x")
    assert outputs(tmp_path) == before
    preprocess([source], load_tokenizer("bytes"), tmp_path / "x", overwrite=True)
    assert len(IndexedTokens(tmp_path / "x").tokens) == 3


def test_an_input_is_never_written_over(tmp_path: Path) -> None:
    source = text(tmp_path, b'{"text": "a"}\n', "x.json")
    with pytest.raises(DataError, match="is an input"):
        preprocess([source], load_tokenizer("bytes"), tmp_path / "x", overwrite=True)
    assert source.read_bytes() == b'{"text": "a"}\n'


def test_a_bad_line_in_the_middle_leaves_nothing_and_the_old_output_alone(tmp_path: Path) -> None:
    preprocess([text(tmp_path, b"a\n")], load_tokenizer("bytes"), tmp_path / "x")
    before = outputs(tmp_path)
    bad = text(tmp_path, b"long enough\n" * 100_000 + b"\xff\n")
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"in\.txt:100001: not UTF-8"):
            preprocess([bad], load_tokenizer("bytes"), tmp_path / "x", workers=workers, overwrite=True)
        assert outputs(tmp_path) == before


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the system answers a write in the same place with an error."""
    source = text(tmp_path, b"some text\n" * 50_000)
    code = f"""
import resource, sys
from dufu.cli.main import run
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
sys.exit(run(["preprocess", {str(source)!r}, "--out", {str(tmp_path / "x")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert (
        done.stderr.startswith("error: ") and "cannot be written (File too large)" in done.stderr and done.stderr.count("\n") == 1
    )
    assert not outputs(tmp_path)


def test_a_worker_that_dies_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch's worker ends, as the system's out-of-memory killer would end it."""
    source = text(tmp_path, b"some text that is long enough\n" * 40_000)
    code = f"""
import os, signal, sys
from pathlib import Path
from dufu.cli.main import run
import dufu.data.preprocess as p
def kill(tally, documents, tokens):
    for child in Path("/proc/self/task").glob("*/children"):
        for pid in child.read_text().split():
            if b"spawn_main" in Path(f"/proc/{{pid}}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)
if __name__ == "__main__":
    original = p.preprocess
    p.preprocess = lambda *a, **k: original(*a, **{{**k, "progress": kill}})
    sys.exit(run(["preprocess", {str(source)!r}, "--out", {str(tmp_path / "x")!r}, "--workers", "2"]))
"""
    (tmp_path / "run.py").write_text(code)
    done = subprocess.run([sys.executable, str(tmp_path / "run.py")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "a tokenising process has died" in done.stderr
    assert not outputs(tmp_path)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Five times the text, the same peak, within 12 MB of noise (the larger file and its tokens are 30 MB and 60 MB). The smaller file is long
    enough for the allocator to have reached its level."""
    line = b"the quick brown fox jumps over the lazy dog " * 4 + b"\n"
    peaks = []
    for count in (6 << 20, 30 << 20):
        source = text(tmp_path, line * (count // len(line)), f"in{count}.txt")
        code = f"""
from dufu.data import load_tokenizer
from dufu.data.preprocess import preprocess
preprocess([{str(source)!r}], load_tokenizer("bytes"), {str(tmp_path / f"x{count}")!r})
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 12 * 1024, peaks


def test_a_learnt_tokenizer_is_kept_whole_and_is_the_same_every_time(corpus: Path, tmp_path: Path) -> None:
    first = learn_tokenizer([corpus], 500, tmp_path / "a")
    assert first.vocab_size == 500
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    assert (
        load_tokenizer(tmp_path / "a").fingerprint
        == first.fingerprint
        == learn_tokenizer([corpus], 500, tmp_path / "b").fingerprint
    )
    sample = "def f(x): return  'é世'"
    assert first.decode(first.encode(sample)) == sample
    with pytest.raises(DataError, match="holds a tokenizer already"):
        learn_tokenizer([corpus], 500, tmp_path / "a")
    with pytest.raises(ConfigError, match="at least 261"):
        learn_tokenizer([corpus], 200, tmp_path / "c")


def test_no_text_teaches_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document"):
        learn_tokenizer([text(tmp_path, b"\n")], 300, tmp_path / "t")
    assert not (tmp_path / "t").exists()
