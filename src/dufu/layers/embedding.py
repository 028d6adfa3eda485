"""Embedding tables: replicated, or with the vocabulary divided over tensor-parallel processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.layers.initial import Described, Initial, Normal
from dufu.layers.split import WHOLE, Split, SplitRule


class Embedding(Described):
    """A table of `num_embeddings` rows, whole on every process.

    Shapes: (…) integers → (…, embedding_dim).
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, init: Initial | None = None
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim))
        self.initial: dict[str, Initial] = {"weight": init or Normal(0.02)}
        self.fill_alone()

    def forward(self, ids: Tensor) -> Tensor:
        """Look up each number's row."""
        return functional.embedding(ids, self.weight, self.padding_idx)


class VocabEmbedding(Described):
    """A table whose rows are divided over tensor-parallel processes; its weight can serve as the output head too.

    A vocabulary that does not divide is padded by rows that no checkpoint and no sample ever sees.

    Shapes: (…) integers in [0, num_embeddings) → (…, embedding_dim).
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, init: Initial | None = None
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.split: Split = WHOLE
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim))
        self.initial: dict[str, Initial] = {"weight": init or Normal(0.02)}
        self.splits = {"weight": SplitRule(0, padded=True)}
        self.fill_alone()

    def forward(self, ids: Tensor) -> Tensor:
        """Look up each number's row; a process gives zeros for rows that it does not hold, and the parts are summed."""
        if self.split.size == 1:
            return functional.embedding(ids, self.weight, self.padding_idx)
        rows = self.weight.shape[0]
        local = ids - self.split.rank * rows
        outside = (local < 0) | (local >= rows)
        found = functional.embedding(local.masked_fill(outside, 0), self.weight)
        return self.split.leave(found.masked_fill(outside.unsqueeze(-1), 0.0))
