"""Windows for causal language modelling."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from dufu.data import CausalLMDataset, load_tokenizer
from dufu.data.splits import split_boundaries
from dufu.errors import ConfigError, DataError
from tests.data.made import numbered, write_tokens

TOKENIZER = load_tokenizer("bytes")


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 18, 40])
def test_each_token_is_a_label_once(tmp_path: Path, length: int) -> None:
    """All but the first of the split, in order; the last window may be short, also where it is the only one."""
    source = numbered(tmp_path / "x", [[7], [1], [4, 5]])
    dataset = CausalLMDataset(source, TOKENIZER, 0, 3, length)
    labels = np.concatenate([dataset[i]["labels"] for i in range(len(dataset))])
    inputs = np.concatenate([dataset[i]["input_ids"] for i in range(len(dataset))])
    assert labels[labels >= 0].tolist() == list(range(1, 17))
    assert inputs[labels >= 0].tolist() == list(range(16))
    assert (inputs[labels < 0] == TOKENIZER.special("pad")).all()
    assert all(dataset[i]["input_ids"].shape == (length,) for i in range(len(dataset)))


def test_splits_share_no_token(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    source = numbered(tmp_path / "x", [[int(n)] for n in random.integers(2, 9, 30)])
    bounds = split_boundaries(30, (0.5, 0.3, 0.2))
    seen = []
    for first, last in itertools.pairwise(bounds):
        dataset = CausalLMDataset(source, TOKENIZER, first, last, 8)
        found = {int(t) for i in range(len(dataset)) for f in ("input_ids", "labels") for t in dataset[i][f]}
        seen.append(found - {-100, TOKENIZER.special("pad")})
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])
    assert seen[0] | seen[1] | seen[2] == set(range(len(source.tokens)))


def test_isolated_documents_keep_labels_and_positions_apart(tmp_path: Path) -> None:
    """Documents 0 1 2 | 3 4 | 5 6 7 8 in windows of 4: no label crosses, positions begin at 0 in each."""
    source = numbered(tmp_path / "x", [[3], [1, 1], [4]])
    dataset = CausalLMDataset(source, TOKENIZER, 0, 3, 4, documents="isolate")
    first, last = dataset[0], dataset[1]
    assert first["input_ids"].tolist() == [0, 1, 2, 3] and first["labels"].tolist() == [1, 2, -100, 4]
    assert first["positions"].tolist() == [0, 1, 2, 0] and first["documents"].tolist() == [0, 0, 0, 1]
    assert last["input_ids"].tolist() == [4, 5, 6, 7] and last["labels"].tolist() == [-100, 6, 7, 8]
    assert last["positions"].tolist() == [0, 0, 1, 2] and last["documents"].tolist() == [0, 1, 1, 1]


def test_padding_is_a_document_of_its_own(tmp_path: Path) -> None:
    sample = CausalLMDataset(numbered(tmp_path / "x", [[3]]), TOKENIZER, 0, 1, 5, documents="isolate")[0]
    assert sample["documents"].tolist() == [0, 0, -1, -1, -1] and sample["labels"].tolist() == [1, 2, -100, -100, -100]


def test_an_end_token_that_is_also_the_pad_token_is_still_learnt(tmp_path: Path) -> None:
    """B096: documents "a E" and "b c d E", padded with E."""
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[UNK]\na\nb\nc\nd\n[PAD]\n")
    tokenizer = load_tokenizer(vocabulary)
    end = tokenizer.eod
    assert end == tokenizer.special("pad") == 5
    source = write_tokens(tmp_path / "x", [[[1, end]], [[2, 3, 4, end]]])
    sample = CausalLMDataset(source, tokenizer, 0, 2, 8)[0]
    assert sample["input_ids"].tolist() == [1, end, 2, 3, 4, end, end, end]
    assert sample["labels"].tolist() == [end, 2, 3, 4, end, -100, -100, -100]


def test_a_split_without_a_sample_is_an_error_that_says_so(tmp_path: Path) -> None:
    source = numbered(tmp_path / "x", [[1], [4]])
    with pytest.raises(DataError, match="documents 0 to 1 hold 1 tokens; a sample needs at least 2"):
        CausalLMDataset(source, TOKENIZER, 0, 1, 4)
    with pytest.raises(DataError, match="hold 0 tokens"):
        CausalLMDataset(source, TOKENIZER, 1, 1, 4)
    with pytest.raises(ConfigError, match="sequence_length=0: at least 1"):
        CausalLMDataset(source, TOKENIZER, 0, 2, 0)
    with pytest.raises(ConfigError, match='"join" or "isolate"'):
        CausalLMDataset(source, TOKENIZER, 0, 2, 4, documents="apart")  # type: ignore[arg-type]


def test_the_fingerprint_follows_everything_that_decides_a_sample(tmp_path: Path) -> None:
    """B084: content, split, length, documents, tokenizer; changing nothing changes nothing."""
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[UNK]\n" + "\n".join(chr(97 + i) for i in range(25)) + "\n[PAD]\n")
    source, other = numbered(tmp_path / "x", [[9], [9]]), numbered(tmp_path / "y", [[9], [8, 1]])
    found = [
        CausalLMDataset(source, TOKENIZER, 0, 2, 4),
        CausalLMDataset(other, TOKENIZER, 0, 2, 4),
        CausalLMDataset(source, TOKENIZER, 0, 1, 4),
        CausalLMDataset(source, TOKENIZER, 0, 2, 5),
        CausalLMDataset(source, TOKENIZER, 0, 2, 4, "isolate"),
        CausalLMDataset(source, load_tokenizer(vocabulary), 0, 2, 4),
    ]
    assert len({d.fingerprint for d in found}) == len(found)
    assert CausalLMDataset(source, TOKENIZER, 0, 2, 4).fingerprint == found[0].fingerprint
