"""Which tokens continue a word."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from dufu.data.preprocess import learn_tokenizer
from dufu.data.tokenizer import TextTokenizer, load_tokenizer
from dufu.data.words import WordMarker
from dufu.errors import ConfigError
from tests.data.made import bert_vocabulary


def words(tokenizer: TextTokenizer, text: str, chinese: bool = False) -> list[str]:
    """Return the words of a text, each as its tokens decoded together."""
    numbers = tokenizer.encode(text)
    groups: list[list[int]] = []
    for number, goes_on in zip(numbers, WordMarker(tokenizer, chinese).continuations(numbers)):
        groups[-1].append(number) if goes_on else groups.append([number])
    return [tokenizer.decode(group) for group in groups]


def test_wordpiece(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(bert_vocabulary(tmp_path))
    numbers = [
        tokenizer.tokenizer.token_to_id(t) for t in ("the", "cat", "##s", "un", "##able", ",", "中", "国", "'", "play", "##ting")
    ]
    assert WordMarker(tokenizer).continuations(numbers).tolist() == [
        False,
        False,
        True,
        False,
        True,
        False,
        False,
        False,
        False,
        False,
        True,
    ]


def test_bytes_of_letters_digits_and_signs() -> None:
    assert words(load_tokenizer("bytes"), "It's é1 世界…") == ["It", "'", "s", " ", "é", "1", " ", "世", "界", "…"]


def test_letters_with_combining_marks_stay_together() -> None:
    """Devanagari vowel signs are marks, not letters."""
    assert words(load_tokenizer("bytes"), "हिन्दी भाषा") == ["हिन्दी", " ", "भाषा"]


def test_byte_level_bpe_words_begin_at_their_space(corpus: Path, tmp_path: Path) -> None:
    tokenizer = learn_tokenizer([corpus], 400, tmp_path / "t")
    text = "unbelievable quartz, 42nd"
    found = [word.strip() for word in words(tokenizer, text)]
    # A space that the vocabulary has not merged with the letter after it stands alone.
    assert [word for word in found if word] == ["unbelievable", "quartz", ",", "42", "nd"]
    assert len(tokenizer.encode(text)) > len(found)


def test_a_special_token_ends_a_word() -> None:
    tokenizer = load_tokenizer("bytes")
    a, mask = ord("a"), tokenizer.special("mask")
    assert WordMarker(tokenizer).continuations([a, a, mask, mask, a, a]).tolist() == [False, True, False, False, False, True]


def test_a_character_cut_off_at_the_edge_is_no_error() -> None:
    tokenizer = load_tokenizer("bytes")
    numbers = [*"世a".encode()[1:], 0xE4]
    flags = WordMarker(tokenizer).continuations(numbers)
    assert len(flags) == 4 and not flags[0] and not flags[2]


@pytest.mark.parametrize("kind", ["bert", "bytes"])
def test_chinese_words_by_jieba(tmp_path: Path, kind: str) -> None:
    """The example of the BERT-wwm paper (Cui et al., 2019): 使用 语言 模型 来 预测 … 一个 词."""
    pytest.importorskip("jieba")
    tokenizer = load_tokenizer("bytes" if kind == "bytes" else bert_vocabulary(tmp_path))
    text = "使用语言模型来预测"
    assert [w.replace(" ", "") for w in words(tokenizer, text, chinese=True)] == ["使用", "语言", "模型", "来", "预测"]
    assert [w.replace(" ", "") for w in words(tokenizer, text)] == list(text)


def test_without_jieba_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "jieba":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'dufu\[chinese\]'"):
        WordMarker(load_tokenizer("bytes"), chinese=True)
