"""Tokenizers by known values, and back to text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dufu.data.tokenizer import byte_characters, load_tokenizer
from dufu.errors import ConfigError
from tests.small import documents

# The vocabulary and the two examples of the original BERT's own tokenizer test (google-research/bert, tokenization_test.py).
ORIGINAL = ["[UNK]", "[CLS]", "[SEP]", "want", "##want", "##ed", "wa", "un", "runn", "##ing", ","]


def vocabulary(folder: Path, words: list[str], end: str = "\n") -> Path:
    path = folder / "vocab.txt"
    path.write_bytes((end.join(words) + end).encode())
    return path


def test_bytes_are_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.vocab_size == 261
    sample = "aé世\U0001f600\x00\n \t"
    assert tokenizer.encode(sample) == list(sample.encode())
    assert tokenizer.decode(tokenizer.encode(sample)) == sample
    assert [tokenizer.special(role) for role in ("eod", "pad", "cls", "sep", "mask")] == [256, 257, 258, 259, 260]
    assert tokenizer.special_numbers == {256, 257, 258, 259, 260}


def test_bert_on_its_own_examples(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(vocabulary(tmp_path, ORIGINAL))
    assert tokenizer.encode("UNwant\u00e9d,running") == [7, 4, 5, 10, 8, 9]


@pytest.mark.parametrize(
    ("text", "lower", "expected"),
    [
        ("ah\u535a\u63a8zz", True, ["ah", "\u535a", "\u63a8", "zz"]),
        (" \tHeLLo!how  \n Are yoU?  ", True, ["hello", "!", "how", "are", "you", "?"]),
        (" \tHeLLo!how  \n Are yoU?  ", False, ["HeLLo", "!", "how", "Are", "yoU", "?"]),
        ("H\u00e9llo", True, ["hello"]),
        ("H\u00e9llo", False, ["[UNK]"]),
        ("a\u0000b\ufffd\x07c", True, ["abc"]),
        ("a\u00a0b", True, ["a", "b"]),
        ("$a^b", True, ["$", "a", "^", "b"]),
        ("a" * 100, True, ["a", *["##a"] * 99]),
        ("a" * 101, True, ["[UNK]"]),
        ("中文，标点。ABC", True, ["中", "文", "，", "标", "点", "。", "abc"]),
        ("[MASK] x [SEP]", True, ["[MASK]", "[UNK]", "[SEP]"]),
    ],
)
def test_berts_rules(tmp_path: Path, text: str, lower: bool, expected: list[str]) -> None:
    """The expectations are those of the original BERT tests for its basic tokenizer, and of its rules for white space, controls and length."""
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] ah zz hello HeLLo how are Are you yoU ! ? a b c abc ##a $ ^ 博 推 中 文 标 点 ， 。"
    tokenizer = load_tokenizer(vocabulary(tmp_path, words.split()), lower)
    assert [tokenizer.token(n) for n in tokenizer.encode(text)] == expected


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_and_a_byte_order_mark_do_not_change_a_vocabulary(tmp_path: Path, end: str) -> None:
    path = vocabulary(tmp_path, ORIGINAL, end)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == 11 and tokenizer.encode("wa") == [6]


def test_gpt2_files(tmp_path: Path) -> None:
    """By hand: merges are applied in their order; a space belongs to the word after it."""
    words = [*byte_characters(), "he", "ll", "hell", "hello", "Ġw", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\nhell o\nĠ w\n")
    for spec in (tmp_path, tmp_path / "vocab.json"):
        tokenizer = load_tokenizer(spec)
        assert tokenizer.encode("hello wé<|endoftext|>") == [259, 260, 0xC3, 0xA9, 261]
        assert tokenizer.decode([259, 260, 0xC3, 0xA9]) == "hello wé"
        assert tokenizer.eod == 261 and not tokenizer.has("pad")
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ConfigError, match=r"no .*merges\.txt"):
        load_tokenizer(tmp_path / "vocab.json")


@pytest.mark.parametrize("kind", ["bytes", "bert"])
def test_a_saved_tokenizer_is_the_same(tmp_path: Path, kind: str) -> None:
    first = load_tokenizer("bytes" if kind == "bytes" else vocabulary(tmp_path, [*ORIGINAL, "[PAD]", "[MASK]"]))
    first.save(tmp_path / "saved")
    second = load_tokenizer(tmp_path / "saved")
    assert second.fingerprint == first.fingerprint
    assert [second.encode(t) for t in documents(20)] == [first.encode(t) for t in documents(20)]
    assert all(second.special(role) == first.special(role) for role in ("eod", "pad", "cls", "sep", "mask"))


def test_roles_are_those_that_the_maker_named(tmp_path: Path) -> None:
    load_tokenizer("bytes").save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"eos_token": {"content": "<|sep|>"}, "pad_token": "<|sep|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eod == tokenizer.special("pad") == 259


def test_truncation_and_padding_of_a_tokenizer_file_are_switched_off(tmp_path: Path) -> None:
    """Published files often carry `max_length: 512`, which would silently cut every longer document."""
    made = load_tokenizer("bytes").tokenizer
    made.enable_truncation(max_length=4)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert len(tokenizer.encode("a" * 100)) == 100
    assert tokenizer.encode_batch(["a", "abc"]) == [[97], [97, 98, 99]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "no such file"),
        (lambda p: p.mkdir(), "holds no tokenizer.json"),
        (lambda p: p.write_text("a\nb\n"), r"no \[UNK\] line"),
        (lambda p: p.write_bytes(b"\xff\n"), "not UTF-8"),
    ],
)
def test_what_is_no_tokenizer_says_so(tmp_path: Path, make, message: str) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "t")
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path / "t")


def test_a_json_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a tokenizer\.json"):
        load_tokenizer(tmp_path / "t.json")


def test_a_missing_role_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no mask token"):
        load_tokenizer(vocabulary(tmp_path, ORIGINAL)).special("mask")
