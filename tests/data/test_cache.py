"""Raw files tokenised once: reused where nothing changed, made again where anything did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dufu.data import IndexedTokens, load_tokenizer
from dufu.data.cache import tokenised
from dufu.data.preprocess import preprocess
from dufu.errors import DataError
from tests.data.made import bert_vocabulary

BYTES = load_tokenizer("bytes")


def raw(folder: Path, content: str = "the cat sat. on the mat\n\nthe end\n", name: str = "in.txt") -> Path:
    path = folder / name
    path.write_text(content)
    return path


def test_what_is_there_is_used_again(tmp_path: Path) -> None:
    first = tokenised(raw(tmp_path), BYTES, tmp_path / "cache")
    stamp = os.stat(f"{first}.bin").st_mtime_ns
    assert tokenised(raw(tmp_path, name="copy.txt"), BYTES, tmp_path / "cache") == first
    assert os.stat(f"{first}.bin").st_mtime_ns == stamp
    assert sorted(p.name for p in Path(first).parent.iterdir()) == ["tokens.bin", "tokens.idx", "tokens.json"]


def test_any_change_makes_it_anew(tmp_path: Path) -> None:
    """B084: content under the same name and of the same length, tokenizer, each option, the kind of file."""
    cache = tmp_path / "cache"
    found = [
        tokenised(raw(tmp_path), BYTES, cache),
        tokenised(raw(tmp_path, "the cat sat. on the hat\n\nthe end\n"), BYTES, cache),
        tokenised(raw(tmp_path), load_tokenizer(bert_vocabulary(tmp_path)), cache),
        tokenised(raw(tmp_path), BYTES, cache, append_eod=False),
        tokenised(raw(tmp_path), BYTES, cache, documents="blank-lines"),
        tokenised(raw(tmp_path), BYTES, cache, split_sentences=True),
        tokenised(raw(tmp_path, '{"text": "a"}\n', "in.jsonl"), BYTES, cache),
        tokenised(raw(tmp_path, '{"text": "a"}\n'), BYTES, cache),
    ]
    assert len(set(found)) == len(found)
    assert IndexedTokens(found[1]).fingerprint != IndexedTokens(found[0]).fingerprint
    assert tokenised(raw(tmp_path), BYTES, cache) == found[0]


@pytest.mark.parametrize("missing", ["tokens.bin", "tokens.idx", "tokens.json"])
def test_an_incomplete_entry_is_made_anew(tmp_path: Path, missing: str) -> None:
    first = tokenised(raw(tmp_path), BYTES, tmp_path / "cache")
    Path(first).with_name(missing).unlink()
    assert tokenised(raw(tmp_path), BYTES, tmp_path / "cache") == first
    assert IndexedTokens(first).document_count == 2


def test_a_prefix_is_itself_by_any_of_its_names(tmp_path: Path) -> None:
    preprocess([raw(tmp_path)], BYTES, tmp_path / "x")
    for name in ("x", "x.bin", "x.idx"):
        assert tokenised(tmp_path / name, BYTES) == str(tmp_path / "x")


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    preprocess([raw(tmp_path)], BYTES, tmp_path / "x")
    with pytest.raises(DataError, match=r"made with tokenizer bytes .* set tokenization\.tokenizer=bytes"):
        tokenised(tmp_path / "x", load_tokenizer(bert_vocabulary(tmp_path)))


def test_tokens_without_a_note_are_taken(tmp_path: Path) -> None:
    preprocess([raw(tmp_path)], BYTES, tmp_path / "x")
    (tmp_path / "x.json").unlink()
    assert tokenised(tmp_path / "x", load_tokenizer(bert_vocabulary(tmp_path))) == str(tmp_path / "x")


def test_what_is_missing_or_means_two_things_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none: no such file, and no .*none\.bin"):
        tokenised(tmp_path / "none", BYTES)
    (tmp_path / "half.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"only .*half\.bin"):
        tokenised(tmp_path / "half", BYTES)
    preprocess([raw(tmp_path)], BYTES, tmp_path / "in.txt")
    with pytest.raises(DataError, match=r"is a raw file, and also the prefix of .*in\.txt\.bin"):
        tokenised(tmp_path / "in.txt", BYTES)
    assert tokenised(tmp_path / "in.txt.bin", BYTES) == str(tmp_path / "in.txt")


def test_runs_started_together_make_one_entry(tmp_path: Path) -> None:
    source = raw(tmp_path, "some text that is long enough\n" * 60_000)
    code = f"""
from dufu.data import IndexedTokens, load_tokenizer
from dufu.data.cache import tokenised
import dufu.data.cache as cache
original = cache.preprocess
cache.preprocess = lambda *a, **k: print("made") or original(*a, **k)
print(IndexedTokens(tokenised({str(source)!r}, load_tokenizer("bytes"), {str(tmp_path / "cache")!r})).document_count)
"""
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [run.communicate(timeout=60)[0].split() for run in runs]
    assert all(run.returncode == 0 for run in runs)
    assert [words[-1] for words in printed] == ["60000"] * 3
    assert sum(words.count("made") for words in printed) == 1
