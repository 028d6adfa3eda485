"""BERT's samples: every token once an epoch, fresh masks each epoch, the same for everyone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dufu.data import BertDataset, IndexedTokens, load_tokenizer
from dufu.data.blend import Concatenated
from dufu.data.feed import Feed
from dufu.data.preprocess import preprocess
from dufu.errors import ConfigError, DataError
from tests.data.made import bert_vocabulary, write_tokens

BYTES = load_tokenizer("bytes")
CLS, SEP, PAD = (BYTES.special(role) for role in ("cls", "sep", "pad"))
TASKS = ("order", "next", "none")


@pytest.fixture(scope="module")
def sources(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, IndexedTokens]:
    """The same documents, whole and in sentences."""
    folder = tmp_path_factory.mktemp("tokens")
    for split in (False, True):
        preprocess([corpus], BYTES, folder / f"x{split}", split_sentences=split)
    return {split: IndexedTokens(folder / f"x{split}") for split in (False, True)}


def dataset(source: IndexedTokens, pairs: str = "order", length: int = 64, **options: Any) -> BertDataset:
    return BertDataset(source, BYTES, 0, source.document_count, length, pairs, **options)  # type: ignore[arg-type]


def original(sample: dict[str, Any]) -> np.ndarray:
    """Return the sample's tokens before any were hidden, without padding."""
    tokens = np.where(sample["labels"] >= 0, sample["labels"], sample["input_ids"])
    return tokens[sample["padding"]]


def segments(sample: dict[str, Any]) -> list[list[int]]:
    tokens, kinds = original(sample).tolist(), sample["token_types"][sample["padding"]].tolist()
    out = [[t for t, k in zip(tokens, kinds) if k == kind] for kind in sorted(set(kinds))]
    assert out[0][0] == CLS and all(s[-1] == SEP for s in out)
    return [out[0][1:-1], *[s[:-1] for s in out[1:]]]


@pytest.mark.parametrize("pairs", TASKS)
@pytest.mark.parametrize("split", [False, True])
def test_every_token_of_the_split_is_used_once_an_epoch(sources: dict[bool, IndexedTokens], pairs: str, split: bool) -> None:
    """As a multiset over the epoch; the documents' end tokens are no text."""
    source = sources[split]
    made = dataset(source, pairs)
    for epoch in (0, 3):
        seen: Counter[int] = Counter()
        for index in range(len(made)):
            seen.update(t for s in segments(made.item(index, epoch)) for t in s)
        expected = Counter(source.tokens.tolist())
        assert expected.pop(BYTES.eod) == source.document_count
        assert seen == expected


@pytest.mark.parametrize("pairs", TASKS)
def test_the_form_of_a_sample(sources: dict[bool, IndexedTokens], pairs: str) -> None:
    made = dataset(sources[True], pairs)
    for index in range(len(made)):
        sample = made[index]
        assert {k: (v.shape, v.dtype.kind) for k, v in sample.items()} == {
            "input_ids": ((64,), "i"), "labels": ((64,), "i"), "padding": ((64,), "b"), "token_types": ((64,), "i"), "sentence_labels": ((), "i"),
        }  # fmt: skip
        size = int(sample["padding"].sum())
        assert sample["padding"][:size].all()
        assert (sample["input_ids"][size:] == PAD).all() and (sample["labels"][size:] == -100).all()
        assert (sample["token_types"][size:] == 0).all()
        parts = segments(sample)
        assert len(parts) == (1 if pairs == "none" or sample["sentence_labels"] == -100 else 2) and all(parts)
        hidden = int((sample["labels"] >= 0).sum())
        assert 1 <= hidden <= max(1, round(0.15 * (size - len(parts) - 1))) or hidden == size - len(parts) - 1


@pytest.mark.parametrize("pairs", TASKS)
def test_samples_are_a_function_of_seed_epoch_and_number(sources: dict[bool, IndexedTokens], pairs: str) -> None:
    first, again, other = (dataset(sources[True], pairs, seed=seed) for seed in (1, 1, 2))

    def content(made: BertDataset, index: int, epoch: int) -> bytes:
        return b"".join(v.tobytes() for v in made.item(index, epoch).values())

    for index in (0, len(first) // 2, len(first) - 1):
        assert content(first, index, 5) == content(again, index, 5)
    different = [content(first, i, 0) != content(first, i, 1) for i in range(30)]
    assert sum(different) > 25
    assert sum(content(first, i, 0) != content(other, i, 0) for i in range(30)) > 25


def test_swapped_parts_are_those_in_the_wrong_order(sources: dict[bool, IndexedTokens]) -> None:
    for split in (False, True):
        source = sources[split]
        made = dataset(source)
        labels = []
        for index in range(len(made)):
            sample = made.item(index, 1)
            start, stop = made.rows[index].tolist()
            text = source.tokens[start:stop].tolist()
            first, second = segments(sample)
            assert (second + first if sample["sentence_labels"] else first + second) == text
            labels.append(int(sample["sentence_labels"]))
            if split:
                inner = [e - start for e in source.sequence_starts(0, len(source)).tolist() if start < e < stop]
                assert not inner or len(text) - len(first) in inner or len(first) in inner
        assert abs(np.mean(labels) - 0.5) < 4 * 0.5 / np.sqrt(len(labels))  # four standard deviations


def test_a_following_part_is_from_elsewhere_exactly_where_the_label_says(sources: dict[bool, IndexedTokens]) -> None:
    source = sources[True]
    made = dataset(source, "next")
    labels = []
    for index in range(len(made)):
        sample = made.item(index, 2)
        start, cut, stop = made.rows[index].tolist()
        parts = segments(sample)
        assert parts[0] == source.tokens[start:cut].tolist()
        if sample["sentence_labels"] == 0:
            assert parts[1] == source.tokens[cut:stop].tolist()
        elif sample["sentence_labels"] == 1:
            assert parts[1] != source.tokens[cut:stop].tolist()
        labels.append(int(sample["sentence_labels"]))
    scored = np.array([label for label in labels if label >= 0])
    # Pairs from one document are not exchanged, so somewhat less than half.
    assert 0.3 < scored.mean() < 0.6


def test_documents_of_one_token(tmp_path: Path) -> None:
    """Nothing to cut: no second part and no question; the token itself is predicted."""
    source = write_tokens(tmp_path / "x", [[[65]], [[66]], [[67], [68, 69]]])
    for pairs in TASKS:
        made = dataset(source, pairs, 16)
        assert len(made) == 3
        sample = made[[r[0] for r in made.rows.tolist()].index(0)]
        assert segments(sample) == [[65]] and sample["sentence_labels"] == -100
        assert (sample["labels"] >= 0).sum() == 1


def test_words_are_hidden_whole(sources: dict[bool, IndexedTokens]) -> None:
    """With bytes as tokens, a word of letters is hidden in all its letters or in none."""
    made = dataset(sources[False], "none", 128)
    for index in range(40):
        sample = made.item(index, 0)
        text, hidden = bytes(original(sample)[1:-1].tolist()).decode("latin-1"), (sample["labels"] >= 0)[sample["padding"]][1:-1]
        for place in range(1, len(text)):
            if text[place - 1].isascii() and text[place].isascii() and text[place - 1].isalpha() and text[place].isalpha():
                assert hidden[place] == hidden[place - 1], text[place - 10 : place + 10]
    parted = dataset(sources[False], "none", 128, whole_words=False)
    assert any((s["labels"] >= 0).sum() == round(0.15 * (s["padding"].sum() - 2)) for s in (parted[i] for i in range(5)))


def test_chinese_words_are_hidden_whole(tmp_path: Path) -> None:
    pytest.importorskip("jieba")
    tokenizer = load_tokenizer(bert_vocabulary(tmp_path))
    (tmp_path / "in.txt").write_text("使用语言模型来预测\n" * 3)
    preprocess([tmp_path / "in.txt"], tokenizer, tmp_path / "x")
    source = IndexedTokens(tmp_path / "x")
    made = BertDataset(source, tokenizer, 0, 3, 16, "none", mask_probability=0.4, chinese_wwm=True)
    bounds = [(1, 3), (3, 5), (5, 7), (7, 8), (8, 10)]  # 使用 语言 模型 来 预测, after [CLS]
    for epoch in range(20):
        hidden = made.item(0, epoch)["labels"] >= 0
        assert all(hidden[a:b].all() or not hidden[a:b].any() for a, b in bounds)
    with pytest.raises(ConfigError, match="whole_words=false"):
        BertDataset(source, tokenizer, 0, 3, 16, chinese_wwm=True, whole_words=False)


def test_masks_are_fresh_each_epoch_through_feed_and_blend(sources: dict[bool, IndexedTokens]) -> None:
    """Also where several files are joined, and another file's sample of the same number has draws of its own."""
    joined = Concatenated([dataset(sources[False]), dataset(sources[True])])
    feed = Feed(joined, 4, 1, shuffle=False)
    size = len(joined)
    first, second = feed.load(np.arange(4)), feed.load(np.arange(size, size + 4))
    assert any((a["labels"] != b["labels"]).any() for a, b in zip(first, second))
    assert joined.parts[0]._number != joined.parts[1]._number


def test_the_fingerprint_follows_every_option(sources: dict[bool, IndexedTokens]) -> None:
    """B084."""
    source = sources[True]
    found = [
        dataset(source),
        dataset(sources[False]),
        dataset(source, "next"),
        dataset(source, "none"),
        dataset(source, length=65),
        dataset(source, seed=2),
        dataset(source, mask_probability=0.2),
        dataset(source, max_predictions=3),
        dataset(source, max_ngrams=1),
        dataset(source, whole_words=False),
        BertDataset(source, BYTES, 0, source.document_count - 1, 64),
    ]
    assert len({d.fingerprint for d in found}) == len(found)
    assert dataset(source).fingerprint == found[0].fingerprint


def test_what_cannot_be_a_dataset_says_so(tmp_path: Path, sources: dict[bool, IndexedTokens]) -> None:
    source = sources[True]
    with pytest.raises(ConfigError, match="sequence_length=4: at least 5"):
        dataset(source, length=4)
    with pytest.raises(ConfigError, match="one of order, next, none"):
        dataset(source, "nsp")
    with pytest.raises(DataError, match="needs at least 2 documents"):
        BertDataset(source, BYTES, 0, 1, 64, "next")
    with pytest.raises(DataError, match="hold no text"):
        BertDataset(write_tokens(tmp_path / "x", [[[BYTES.eod]]]), BYTES, 0, 1, 64)
    with pytest.raises(DataError, match="token 1 is number 300, but the tokenizer has 261"):
        BertDataset(write_tokens(tmp_path / "y", [[[65, 300, 66]]]), BYTES, 0, 1, 64)[0]
    no_mask = tmp_path / "vocab.txt"
    no_mask.write_text("[UNK]\na\n[CLS]\n[SEP]\n")
    with pytest.raises(ConfigError, match="has no mask token"):
        BertDataset(source, load_tokenizer(no_mask), 0, 1, 64)
