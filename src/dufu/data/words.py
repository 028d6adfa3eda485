"""Which tokens of a sequence continue a word: WordPiece's `##`, the bytes of byte-level BPE, Chinese words by jieba."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dufu.data.tokenizer import TextTokenizer, byte_characters
from dufu.errors import ConfigError

# CJK ideographs as BERT's tokenizer counts them; each is a word of its own unless a dictionary joins several.
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ebef\U0002f800-\U0002fa1f"
_WORDS = re.compile(rf"(?P<han>[{_HAN}]+)|\d+|(?:(?![{_HAN}])[^\W\d_])+|[^\w\s]|_")
_NO_TEXT = " \ufffc".encode()  # a special token: a sign that joins no word

Flags = npt.NDArray[np.bool_]


class WordMarker:
    """Says which tokens continue the word of the token before them.

    A word is a run of letters (with the marks on them), a run of digits, or any other sign by itself; white space, a special token and a
    change of these classes end it. A WordPiece token that begins with `##` always continues. A Chinese character is a word of its own, or,
    with `chinese`, part of a word that jieba finds in the run of Chinese characters around it.

    Args:
        tokenizer: WordPiece, byte-level BPE (bytes included), or one that marks word beginnings by `▁`.
        chinese: whether to join Chinese characters to words.

    Raises:
        ConfigError: `chinese` is asked for, but jieba is not installed.
    """

    def __init__(self, tokenizer: TextTokenizer, chinese: bool = False) -> None:
        self.cut = chinese_words() if chinese else None
        self._bytes, self._glued = _token_bytes(tokenizer)

    def continuations(self, numbers: Sequence[int] | npt.NDArray[np.integer]) -> Flags:
        """Return for each token (T,) whether it continues a word; the first one never does."""
        pieces = [self._bytes[int(n)] for n in numbers]
        lengths = np.fromiter((len(p) for p in pieces), np.int64, len(pieces))
        ends = np.cumsum(lengths)
        word_of_byte = self._words(b"".join(pieces))
        flags = np.zeros(len(pieces), bool)
        last = 0  # the word in which the text so far ends; 0 = none
        for i, (start, end) in enumerate(zip(ends - lengths, ends)):
            own = word_of_byte[start:end]
            if self._glued[int(numbers[i])]:
                flags[i] = i > 0
            elif end > start:
                flags[i] = i > 0 and last > 0 and own[0] == last
            if end > start:
                last = int(own[-1])
        return flags

    def _words(self, text: bytes) -> npt.NDArray[np.int32]:
        """Return the number of the word, from 1, in which each byte lies; 0 for white space."""
        # A character cut off at the edge becomes signs, each on its own.
        decoded = text.decode("utf-8", "surrogateescape")
        numbers = np.zeros(len(decoded), np.int32)
        count = 0
        marked = -1  # where a letter's combining mark ended: Hindi or Thai letters go on after it
        for match in _WORDS.finditer(decoded):
            start, end = match.span()
            if match.group("han") is None:
                is_mark = unicodedata.category(decoded[start]).startswith("M")
                joined = start > 0 and numbers[start - 1] > 0 and (is_mark or (start == marked and decoded[start].isalpha()))
                count += not joined
                numbers[start:end] = numbers[start - 1] if joined else count
                marked = end if is_mark and joined else -1
                continue
            spans = _spans(start, self.cut(match.group()) if self.cut else match.group())
            for first, stop in spans:
                count += 1
                numbers[first:stop] = count
        if len(decoded) == len(text):
            return numbers
        widths = [len(c.encode("utf-8", "surrogateescape")) for c in decoded]
        return np.repeat(numbers, widths)


def _spans(start: int, words: Iterable[str]) -> Iterable[tuple[int, int]]:
    for word in words:
        yield start, start + len(word)
        start += len(word)


def chinese_words() -> Callable[[str], Iterable[str]]:
    """Return jieba's word cutter.

    Raises:
        ConfigError: jieba is not installed.
    """
    try:
        import jieba
    except ImportError as error:
        raise ConfigError(
            "tokenization.chinese_wwm=true needs jieba, which finds Chinese words; install it with pip install 'dufu[chinese]'"
        ) from error
    jieba.setLogLevel(logging.WARNING)
    cut: Callable[[str], Iterable[str]] = jieba.cut
    return cut


def _token_bytes(tokenizer: TextTokenizer) -> tuple[list[bytes], list[bool]]:
    """Return what each token adds to the text, and whether it is glued to the token before it in any case."""
    numbers = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    model = type(tokenizer.tokenizer.model).__name__
    texts = [_NO_TEXT] * tokenizer.vocab_size
    glued = [False] * tokenizer.vocab_size
    write: Callable[[str], bytes] = _from_wordpiece if model == "WordPiece" else _writer(tokenizer.tokenizer)
    for token, number in numbers.items():
        if number in tokenizer.special_numbers:
            continue
        texts[number] = write(token)
        glued[number] = model == "WordPiece" and token.startswith("##")
    return texts, glued


def _from_wordpiece(token: str) -> bytes:
    """Return a WordPiece token's text: apart from its neighbour by a space, except a `##` piece or a single Chinese character."""
    if token.startswith("##"):
        return token[2:].encode()
    return token.encode() if re.fullmatch(f"[{_HAN}]", token) else f" {token}".encode()


def _writer(tokenizer: Any) -> Callable[[str], bytes]:
    """Return how a byte-level or a `▁` vocabulary writes bytes."""
    if "▁" not in tokenizer.to_str():
        table = {name: bytes([byte]) for byte, name in enumerate(byte_characters())}
        return lambda token: b"".join(table.get(c) or c.encode() for c in token)
    return lambda token: (
        bytes([int(token[3:5], 16)]) if re.fullmatch("<0x[0-9A-F]{2}>", token) else token.replace("▁", " ").encode()
    )
