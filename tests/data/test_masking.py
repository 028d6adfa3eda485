"""Which tokens are hidden, and by what."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dufu.data import load_tokenizer
from dufu.data.masking import IGNORE, Draws, Masker
from dufu.errors import ConfigError

TOKENIZER = load_tokenizer("bytes")
LENGTH = 120


def hide(
    masker: Masker, sample: int = 0, continues: np.ndarray | None = None, text: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(sample).integers(0, 256, LENGTH)
    text = np.ones(LENGTH, bool) if text is None else text
    continues = np.zeros(LENGTH, bool) if continues is None else continues
    return tokens, *masker(tokens, text, continues, Draws(1, 2, 3, sample))


@pytest.mark.parametrize(
    ("probability", "limit", "expected"), [(0.15, None, 18), (0.5, None, 60), (0.001, None, 1), (0.15, 5, 5), (1.0, None, 120)]
)
def test_the_budget_is_met_exactly(probability: float, limit: int | None, expected: int) -> None:
    for sample in range(20):
        tokens, inputs, labels = hide(Masker(TOKENIZER, probability, limit, max_ngrams=3), sample)
        hidden = labels != IGNORE
        assert hidden.sum() == expected
        assert (labels[hidden] == tokens[hidden]).all() and (inputs[~hidden] == tokens[~hidden]).all()


def test_eighty_ten_ten() -> None:
    """Of 18,000 hidden tokens: shares within 4 standard deviations (0.012 and 0.009); random words are never special ones."""
    counts: Counter[str] = Counter()
    for sample in range(1000):
        tokens, inputs, labels = hide(Masker(TOKENIZER), sample)
        for place in np.flatnonzero(labels != IGNORE):
            counts[
                "mask" if inputs[place] == TOKENIZER.special("mask") else "same" if inputs[place] == tokens[place] else "random"
            ] += 1
            assert inputs[place] == TOKENIZER.special("mask") or inputs[place] < 256
    total = sum(counts.values())
    assert total == 18_000
    assert abs(counts["mask"] / total - 0.8) < 0.012
    # One random word in 256 is the token itself.
    assert abs(counts["random"] / total - 0.1 * 255 / 256) < 0.009 and abs(counts["same"] / total - 0.1 - 0.1 / 256) < 0.009


def test_places_are_hidden_evenly() -> None:
    """In 4,000 samples each of 120 places is hidden about 600 times with single words: within 5 standard deviations (22.6)."""
    counts = sum((hide(Masker(TOKENIZER, max_ngrams=1), sample)[2] != IGNORE).astype(int) for sample in range(4000))
    assert np.abs(counts - 600).max() < 113


def test_runs_have_weights_one_over_n() -> None:
    """With three words at most: 6/11, 3/11, 2/11; measured on Masker's own draw over an even grid."""
    masker = Masker(TOKENIZER, max_ngrams=3)
    lengths = Counter(masker._run_length(draw, 10) for draw in (np.arange(11_000) + 0.5) / 11_000)
    assert lengths == {1: 6000, 2: 3000, 3: 2000}
    assert {masker._run_length(draw, 2) for draw in np.linspace(0, 0.999, 50)} == {1, 2}


def test_a_word_is_hidden_whole_or_not_at_all() -> None:
    """Words of one to five tokens, with text that may not be hidden between them."""
    random = np.random.default_rng(0)
    for sample in range(200):
        continues = random.random(LENGTH) < 0.5
        continues[0] = False
        text = random.random(LENGTH) < 0.9
        _, _, labels = hide(Masker(TOKENIZER), sample, continues, text)
        hidden = labels != IGNORE
        assert not (hidden & ~text).any() and 1 <= hidden.sum() <= max(1, round(0.15 * text.sum()))
        inside = continues[1:] & text[1:] & text[:-1]
        assert (hidden[1:] == hidden[:-1])[inside].all()


def test_where_no_word_fits_the_shortest_is_hidden() -> None:
    """Two words, of 70 and 50 tokens, and room for 18."""
    continues = np.ones(LENGTH, bool)
    continues[[0, 70]] = False
    labels = hide(Masker(TOKENIZER), 0, continues)[2]
    assert (labels != IGNORE).tolist() == [False] * 70 + [True] * 50


def test_without_text_nothing_is_hidden() -> None:
    tokens, inputs, labels = hide(Masker(TOKENIZER), text=np.zeros(LENGTH, bool))
    assert (labels == IGNORE).all() and (inputs == tokens).all()


def test_draws_are_a_function_of_their_four_numbers() -> None:
    """And of fixed value: a run resumed with another version of NumPy must see the same masks."""
    base = Draws(1, 2, 3, 4).uniform(3).tolist()
    assert Draws(1, 2, 3, 4).uniform(3).tolist() == base
    others = [Draws(9, 2, 3, 4), Draws(1, 9, 3, 4), Draws(1, 2, 9, 4), Draws(1, 2, 3, 9), Draws(-1, 1 << 63, 3, 4)]
    assert len({tuple(d.uniform(3).tolist()) for d in others} | {tuple(base)}) == 6
    # Philox 4x64-10 by its definition (Salmon et al., 2011): the first block is that of counter + 1.
    assert base[0] == _philox([1, 0, 3, 4], [1, 2])[0] / 2**53


def _philox(counter: list[int], key: list[int]) -> list[int]:
    """Return the four words of a block, their upper 53 bits."""
    bits = (1 << 64) - 1
    c, k = list(counter), list(key)
    for turn in range(10):
        if turn:
            k = [(k[0] + 0x9E3779B97F4A7C15) & bits, (k[1] + 0xBB67AE8584CAA73B) & bits]
        first, second = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(second >> 64) ^ c[1] ^ k[0], second & bits, (first >> 64) ^ c[3] ^ k[1], first & bits]
    return [word >> 11 for word in c]


@pytest.mark.parametrize(("name", "value"), [("probability", 0.0), ("probability", 1.1), ("max_predictions", 0), ("max_ngrams", 0)])
def test_options_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        Masker(TOKENIZER, **{name: value})  # type: ignore[arg-type]
