"""Sentence boundaries in English and Chinese; nothing of a text is lost."""

from __future__ import annotations

import pytest

from dufu.data.sentences import split_sentences
from tests.small import documents


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("He slept. She sang!", ["He slept.", " She sang!"]),
        ("Dr. Smith met J. Brown, e.g. Here.", ["Dr. Smith met J. Brown, e.g. Here."]),
        ("It costs 3.5 dollars. Really?!", ["It costs 3.5 dollars.", " Really?!"]),
        ('"Come in!" he said. "Now."', ['"Come in!" he said.', ' "Now."']),
        ("see www.x.org for more", ["see www.x.org for more"]),
        ("今天天气很好。我们去吧！“好的。”他走了……然后呢？没有了", ["今天天气很好。", "我们去吧！", "“好的。”", "他走了……", "然后呢？", "没有了"]),
        ("one\ntwo\n\nthree", ["one\n", "two\n\n", "three"]),
        ("no end", ["no end"]),
        ("A. \n", ["A. \n"]),
        ("", [""]),
    ],
)  # fmt: skip
def test_known_sentences(text: str, expected: list[str]) -> None:
    assert split_sentences(text) == expected


def test_the_sentences_joined_are_the_text() -> None:
    for text in documents(300):
        parts = split_sentences(text)
        assert "".join(parts) == text
        assert all(part.strip() for part in parts)


def test_a_long_row_of_dots_takes_no_time() -> None:
    """A table of contents must not cost the square of its dots; 200,000 of them would take hours."""
    text = "Contents " + "." * 200_000 + " x"
    assert split_sentences(text) == [text]
