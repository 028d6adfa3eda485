"""Embedding tables: replicated, or with the vocabulary divided over tensor-parallel processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.errors import ConfigError
from dufu.layers.initial import Described, Initial, Normal, ZeroRow
from dufu.layers.split import WHOLE, Split, SplitRule


class Embedding(Described):
    """A table of `num_embeddings` rows, whole on every process.

    Args:
        num_embeddings, embedding_dim: rows and columns.
        padding_idx: a row that begins as zero and that a look-up never trains; None = no such row.
        init: how the other rows begin; None = a normal of standard deviation 0.02.

    Shapes: (…) integers in [0, num_embeddings) → (…, embedding_dim).

    Raises:
        ConfigError: padding_idx is not a row of the table.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, init: Initial | None = None
    ) -> None:
        super().__init__()
        if padding_idx is not None and not 0 <= padding_idx < num_embeddings:
            raise ConfigError(f"padding_idx={padding_idx}: a row of the table, 0 to {num_embeddings - 1}")
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.stream: Split = WHOLE  # whose positions are looked up
        rule: Initial = init or Normal(0.02)
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim))
        self.initial = {"weight": rule if padding_idx is None else ZeroRow(rule, padding_idx)}
        self.fill_alone()

    def forward(self, ids: Tensor) -> Tensor:
        """Look up each number's row."""
        return functional.embedding(self.stream.own(ids), self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        """Describe the layer for print(model)."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


class VocabEmbedding(Embedding):
    """An Embedding whose rows are divided over tensor-parallel processes; its weight can serve as the output head too.

    A vocabulary that does not divide is padded by rows that no checkpoint and no sample ever sees. A head that is tied to the weight
    does train the padding row, as its score is one of the head's.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, init: Initial | None = None
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, init)
        self.split: Split = WHOLE
        self.splits = {"weight": SplitRule(0, padded=True)}

    def forward(self, ids: Tensor) -> Tensor:
        """Look up each number's row; a process gives zeros for rows that it does not hold, and the parts are summed."""
        if self.split.size == 1:
            return super().forward(ids)
        rows = self.weight.shape[0]
        first = self.split.rank * rows
        local = ids - first
        elsewhere = (local < 0) | (local >= rows)
        local = local.masked_fill(elsewhere, 0)
        # What is no word at all stays an error of the look-up, as on one process, instead of reading a padding row.
        local = local.masked_fill((ids < 0) | (ids >= self.num_embeddings), rows)
        padding = None if self.padding_idx is None or not 0 <= self.padding_idx - first < rows else self.padding_idx - first
        found = functional.embedding(local, self.weight, padding)
        return self.split.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))
