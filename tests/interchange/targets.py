"""A dataset of texts with a made-up judgement, for tests of a classifier."""

from __future__ import annotations

from typing import Any

import numpy as np

from dufu.data.indexed import IndexedTokens
from dufu.data.tokenizer import TextTokenizer


class Judged:
    """The first tokens of each document, and whether it is an even one."""

    def __init__(
        self,
        source: IndexedTokens,
        tokenizer: TextTokenizer,
        first_document: int,
        last_document: int,
        sequence_length: int | None = 16,
    ) -> None:
        self.source, self.first, self.count = source, first_document, last_document - first_document
        self.length = min(16, sequence_length or 16)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = self.source.document_start(self.first + index)
        ids = np.zeros(self.length, dtype=np.int64)
        found = self.source.read(start, min(start + self.length, self.source.document_start(self.first + index + 1)), 261)
        ids[: len(found)] = found
        return {"input_ids": ids, "sentence_labels": np.int64(index % 2)}
