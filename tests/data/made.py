"""Token files for tests."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dufu.data import IndexedTokens, IndexedWriter

WORDS = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the a cat sat mat on ##s ##ting play un ##able . , ! ' "
    "中 国 人 大 学 生 我 们 爱 语 言 模 型 使 用 来 预 测 一 个 词"
)


def bert_vocabulary(folder: Path) -> Path:
    """Write a small BERT vocabulary."""
    path = folder / "vocab.txt"
    path.write_text("\n".join(WORDS.split()) + "\n", encoding="utf-8")
    return path


def write_tokens(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], kind: type = np.uint16) -> IndexedTokens:
    """Write documents, each a list of sequences."""
    with IndexedWriter(prefix, np.dtype(kind)) as writer:
        for sequences in documents:
            writer.add_document(*sequences)
    return IndexedTokens(prefix)


def numbered(prefix: Path, lengths: Sequence[Sequence[int]], first: int = 0) -> IndexedTokens:
    """Write documents of given sequence lengths, whose tokens are all different: `first`, `first + 1`, …"""
    documents = []
    for sequences in lengths:
        made = []
        for length in sequences:
            made.append(list(range(first, first + length)))
            first += length
        documents.append(made)
    return write_tokens(prefix, documents, np.int32)


def write_fake_index(prefix: Path, code: int, size: int, lengths: Sequence[int], documents: Sequence[int]) -> None:
    """Write an index by the format's description alone, and tokens that are a hole of the right length."""
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]) * size
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(documents))
    arrays = (np.asarray(lengths, "<i4"), offsets[:-1].astype("<i8"), np.asarray(documents, "<i8"))
    Path(f"{prefix}.idx").write_bytes(header + b"".join(a.tobytes() for a in arrays))
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(int(offsets[-1]))
