"""Raw files to documents: a fixed count, or one line that names file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dufu.data.corpus import Tally, read_documents
from dufu.errors import ConfigError, DataError


def read(path: Path, **options: str) -> tuple[list[str], Tally]:
    tally = Tally()
    return list(read_documents(path, tally=tally, **options)), tally


def write(folder: Path, content: bytes, name: str = "x.txt") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "expected", "empty"),
    [
        (b"", [], 0),
        (b"\n\n \n\t\n", [], 4),
        (b"one\n", ["one"], 0),
        (b"one\ntwo", ["one", "two"], 0),
        (b"\na b\n   \n\nc", ["a b", "c"], 3),
        (b"one\r\ntwo\r\n", ["one", "two"], 0),
        (b"on\re\ntwo\n", ["on\re", "two"], 0),
        ("on\u2028e\u0085x\ntwo\n".encode(), ["on\u2028e\u0085x", "two"], 0),
        (b"\xef\xbb\xbfone\ntwo\n", ["one", "two"], 0),
        (b"x" * 100_000 + b"\ny\n", ["x" * 100_000, "y"], 0),
        (b"a\x00b\n", ["a\x00b"], 0),
    ],
)
def test_lines(tmp_path: Path, content: bytes, expected: list[str], empty: int) -> None:
    """B079 among them: no empty document, whatever the blank lines and the file's end."""
    documents, tally = read(write(tmp_path, content))
    assert documents == expected
    assert tally.skipped["empty"] == empty
    assert tally.bytes == len(content)


def test_blank_lines_separate_documents(tmp_path: Path) -> None:
    documents, _ = read(write(tmp_path, b"\n\none\ntwo\n \n\nthree\n\nfour"), documents="blank-lines")
    assert documents == ["one\ntwo", "three", "four"]


BAD = b"first\nse\xffcond\nthird\n"


def test_bad_bytes_name_file_and_line(tmp_path: Path) -> None:
    """B093."""
    path = write(tmp_path, BAD)
    with pytest.raises(DataError, match=r"x\.txt:2: not UTF-8 \(byte 0xFF at column 3\)"):
        read(path)


def test_bad_bytes_are_skipped_or_replaced_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path, BAD)
    documents, tally = read(path, errors="skip")
    assert documents == ["first", "third"] and tally.skipped == {"not UTF-8": 1} and tally.replaced == 0
    documents, tally = read(path, errors="replace")
    assert documents == ["first", "se\ufffdcond", "third"] and not tally.skipped and tally.replaced == 1


def test_a_file_of_another_encoding_says_which(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.txt:1: not UTF-8 but UTF-16"):
        read(write(tmp_path, "text\n".encode("utf-16")))


def test_json_lines_without_the_field_are_counted(tmp_path: Path) -> None:
    lines = b'{"text": ""}\n{"text": "a b"}\n{"text": "   "}\n{"body": "x"}\n\n[1]\n{"text": "c"}'
    documents, tally = read(write(tmp_path, lines, "x.jsonl"))
    assert documents == ["a b", "c"]
    assert tally.skipped == {"empty": 3, 'no text field "text"': 2}


def test_json_of_another_field(tmp_path: Path) -> None:
    assert read(write(tmp_path, b'{"body": "a\\nb"}\n', "x.jsonl"), text_key="body")[0] == ["a\nb"]


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.jsonl:2: not JSON \(.* at column 10\)"):
        read(write(tmp_path, b'{"text": "a"}\n{"text": }\n', "x.jsonl"))


def test_half_a_surrogate_pair_follows_the_errors_option(tmp_path: Path) -> None:
    """JSON can spell text that no encoding can write."""
    path = write(tmp_path, b'{"text": "a"}\n{"text": "b\\ud800"}\n{"text": "\\ud83d\\ude00"}\n', "x.jsonl")
    with pytest.raises(DataError, match=r"x\.jsonl:2: half of a \\u surrogate pair"):
        read(path)
    assert read(path, errors="skip")[0] == ["a", "\U0001f600"]
    documents, tally = read(path, errors="replace")
    assert len(documents) == 3 and documents[1].startswith("b\ufffd") and tally.replaced == 1


@pytest.mark.parametrize(("option", "near"), [("documents", "blank-lines"), ("errors", "strict")])
def test_an_unknown_option_names_the_nearest(tmp_path: Path, option: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f'did you mean "{near}"'):
        read(write(tmp_path, b"x\n"), **{option: near.replace("i", "y")})


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "none.txt")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path)


def test_the_hash_is_that_of_the_bytes_read(tmp_path: Path) -> None:
    import hashlib

    path = write(tmp_path, BAD)
    assert read(path, errors="skip")[1].hashes == [hashlib.sha256(BAD).hexdigest()]
