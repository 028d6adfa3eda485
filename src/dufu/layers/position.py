"""Position tables that are added to the token embeddings: learned, and sinusoidal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dufu.errors import ConfigError, LayoutError
from dufu.layers.embedding import Embedding
from dufu.layers.initial import Initial
from dufu.layers.split import WHOLE, Split


def _check_length(positions: Tensor, longest: int) -> None:
    if positions.shape[-1] > longest:
        raise LayoutError(f"{positions.shape[-1]} tokens do not fit into max_seq_length={longest}")


class LearnedPositionalEmbedding(Embedding):
    """A trained row for each position (Gehring et al., 2017).

    Args:
        num_embeddings: positions, the longest sequence in tokens.
        embedding_dim: columns.
        padding_idx: a row of the table, offset included; see Embedding.
        init: how the rows begin.
        offset: rows before that of position 0, as OPT, RoBERTa and BART have two; the table has num_embeddings + offset rows.

    Shapes: positions (…, T) in [0, num_embeddings) → (…, T, embedding_dim).

    Raises:
        LayoutError: more tokens than positions.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        init: Initial | None = None,
        offset: int = 0,
    ) -> None:
        super().__init__(num_embeddings + offset, embedding_dim, padding_idx, init)
        self.longest, self.offset = num_embeddings, offset

    def forward(self, positions: Tensor) -> Tensor:
        """Look up each position's row."""
        _check_length(self.stream.own(positions), self.longest)
        return super().forward(positions + self.offset if self.offset else positions)


class SinePositionalEmbedding(nn.Module):
    """Fixed sines and cosines (Vaswani et al., 2017): PE(p, 2i) = sin(p / 10000^(2i/d)), PE(p, 2i+1) = cos of the same.

    Computed from the positions; there is no parameter and no table.

    Args:
        num_embeddings: most tokens of a sequence.
        embedding_dim: width d; even.

    Shapes: positions (…, T) → (…, T, embedding_dim), float32.

    Raises:
        ConfigError: an odd width. LayoutError: more tokens than num_embeddings.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        if embedding_dim % 2:
            raise ConfigError(
                f"SinePositionalEmbedding: embedding_dim={embedding_dim}: an even number, such as {embedding_dim + 1}"
            )
        self.longest, self.embedding_dim = num_embeddings, embedding_dim
        self.stream: Split = WHOLE  # whose positions are computed

    def forward(self, positions: Tensor) -> Tensor:
        """Compute each position's row."""
        positions = self.stream.own(positions)
        _check_length(positions, self.longest)
        exponents = torch.arange(0, self.embedding_dim, 2, device=positions.device, dtype=torch.float64) / self.embedding_dim
        angles = positions.double().unsqueeze(-1) * 10000.0**-exponents
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2).float()
