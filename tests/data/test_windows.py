"""Documents cut into stretches: every token in exactly one, none too long, boundaries at sentence ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dufu.data import windows as module
from dufu.data.windows import windows
from tests.data.made import numbered, write_tokens


def cut(source, limit: int, end: int | None = None, halves: bool = False, first: int = 0, last: int | None = None):  # type: ignore[no-untyped-def]
    rows = list(windows(source, first, source.document_count if last is None else last, limit, end, halves))
    return np.concatenate(rows) if rows else np.zeros((0, 3 if halves else 2), np.int64)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 13, 100])
@pytest.mark.parametrize("halves", [False, True])
def test_every_token_lies_in_one_stretch(tmp_path: Path, limit: int, halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random documents of one or several sequences, some of them empty; small chunks, so that their seams are met."""
    monkeypatch.setattr(module, "_DOCUMENTS", 7)
    monkeypatch.setattr(module, "_SEQUENCES", 12)
    monkeypatch.setattr(module, "_ROWS", 5)
    random = np.random.default_rng(limit)
    lengths = [[int(n) for n in random.integers(0, 12, int(random.integers(1, 6)))] for _ in range(60)]
    source = numbered(tmp_path / "x", lengths)
    rows = cut(source, limit, halves=halves)
    order = np.argsort(rows[:, 0], kind="stable")
    rows = rows[order]
    assert rows[0, 0] == 0 and rows[-1, -1] == len(source.tokens)
    assert (rows[1:, 0] == rows[:-1, -1]).all()
    edges = rows if halves else np.stack([rows[:, 0], rows[:, 1]], 1)
    assert (np.diff(edges, axis=1) <= limit).all() and (np.diff(rows[:, [0, -1]], axis=1) > 0).all()
    owner = source.document_of(np.arange(len(source.tokens)))
    assert (owner[rows[:, 0]] == owner[rows[:, -1] - 1]).all()
    if halves:
        single = rows[:, 2] - rows[:, 0] == 1
        assert (rows[:, 1] > rows[:, 0]).all() and ((rows[:, 1] == rows[:, 2]) == single).all()


def test_one_sequence_is_cut_evenly(tmp_path: Path) -> None:
    """11 tokens in stretches of at most 5: three of about the same size, and no remainder of one token."""
    assert cut(numbered(tmp_path / "x", [[11]]), 5).tolist() == [[0, 3], [3, 7], [7, 11]]


def test_sequences_are_kept_whole_where_they_fit(tmp_path: Path) -> None:
    """Sentences of 4, 3, 4, 3 tokens at most 8 together; one of 11 is cut inside."""
    assert cut(numbered(tmp_path / "x", [[4, 3, 4, 3]]), 8).tolist() == [[0, 7], [7, 14]]
    assert cut(numbered(tmp_path / "y", [[11, 2]]), 5).tolist() == [[0, 5], [5, 9], [9, 13]]


def test_halves_are_divided_at_the_sentence_nearest_to_the_middle(tmp_path: Path) -> None:
    assert cut(numbered(tmp_path / "x", [[2, 3, 4]]), 10, halves=True).tolist() == [[0, 5, 9]]
    assert cut(numbered(tmp_path / "y", [[1]]), 10, halves=True).tolist() == [[0, 1, 1]]
    assert cut(numbered(tmp_path / "z", [[6]]), 10, halves=True).tolist() == [[0, 3, 6]]


def test_a_documents_end_token_is_left_out_and_others_are_not(tmp_path: Path) -> None:
    source = write_tokens(tmp_path / "x", [[[1, 9, 2], [3, 9]], [[9]], [[4, 5]]])
    assert sorted(cut(source, 10, end=9).tolist()) == [[0, 4], [6, 8]]
    assert sorted(cut(source, 10, end=None).tolist()) == [[0, 5], [5, 6], [6, 8]]


def test_only_the_splits_documents_are_cut(tmp_path: Path) -> None:
    source = numbered(tmp_path / "x", [[3], [4], [5]])
    assert cut(source, 10, first=1, last=2).tolist() == [[3, 7]]
    assert cut(source, 10, first=2, last=2).tolist() == []
