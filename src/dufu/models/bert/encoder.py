"""What encoders in BERT's likeness share: the embedding, the layers, and the chain that they begin."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dufu.errors import ConfigError
from dufu.layers.dropout import Dropout
from dufu.layers.embedding import Embedding, VocabEmbedding
from dufu.layers.initial import Normal
from dufu.layers.linear import Linear
from dufu.layers.norm import LayerNorm
from dufu.layers.position import LearnedPositionalEmbedding
from dufu.layers.random import derive, stable_hash
from dufu.layers.transformer import TransformerLayer
from dufu.models.chain import Batch, ChainModel, TransformerUnit


class BertEmbedding(nn.Module):
    """Word plus position plus segment, norm (in the post-norm order), dropout: ids (B, T) → (B, T, H).

    Args:
        vocab_size, length, segments: rows of the three tables; 0 segments = no such table.
        size: width of the tables.
        hidden_size: width of the result; where it differs from `size`, a linear layer leads there (ALBERT's factorised embedding).
        dropout: before the result, or before that linear layer.
        epsilon: of the norm; None = no norm.
        offset: rows of the position table before that of position 0.
    """

    def __init__(
        self,
        vocab_size: int,
        length: int,
        segments: int,
        size: int,
        hidden_size: int,
        dropout: float,
        epsilon: float | None,
        init: Normal,
        offset: int = 0,
    ) -> None:
        super().__init__()
        self.word = VocabEmbedding(vocab_size, size, init=init)
        self.position = LearnedPositionalEmbedding(length, size, init=init, offset=offset)
        self.token_type = Embedding(segments, size, init=init) if segments else None
        self.norm = LayerNorm(size, epsilon) if epsilon is not None else None
        self.dropout = Dropout(dropout)
        self.widen = Linear(size, hidden_size, init=init) if size != hidden_size else None

    def forward(self, state: None, batch: Batch) -> Tensor:
        """Embed the batch's tokens; without token types all are of segment 0."""
        hidden = self.word(batch.input_ids) + self.position(batch.positions)
        if self.token_type is not None:
            types = torch.zeros_like(batch.input_ids) if batch.token_types is None else batch.token_types
            hidden = hidden + self.token_type(types)
        if self.norm is not None:
            hidden = self.norm(hidden)
        embedded: Tensor = self.dropout(hidden, batch.keys)
        return embedded if self.widen is None else self.widen(embedded)


class SharedUnit(nn.Module):
    """A layer whose weights other units of the chain use too; its dropout is its own.

    Args:
        index: number of the unit.
        block: the layer.
    """

    def __init__(self, index: int, block: TransformerLayer) -> None:
        super().__init__()
        self.index, self.block = index, block

    def forward(self, state: Tensor, batch: Batch) -> Tensor:
        """(B, T, H) → (B, T, H)."""
        assert batch.mask is not None
        keys = None if batch.keys is None else derive(batch.keys, stable_hash("layer", self.index))
        hidden: Tensor = self.block(state, batch.mask, keys)
        return hidden


class EncoderChain(ChainModel):
    """Embedding, layers, and whatever head a subclass sets as `head`."""

    causal = False
    dataset: str | None = None  # the samples that it is evaluated on unless a config says otherwise
    position_offset = 0  # rows of the position table before that of position 0
    embedding: BertEmbedding
    layers: nn.ModuleList
    head: nn.Module

    def build_encoder(
        self,
        *,
        vocab_size: int | None,
        hidden_layers: int,
        hidden_size: int,
        ffn_hidden_size: int | None,
        num_attention_heads: int,
        max_seq_length: int,
        num_tokentypes: int,
        embedding_dropout_prob: float,
        attention_dropout_prob: float,
        output_dropout_prob: float,
        layernorm_epsilon: float,
        initializer_range: float,
        use_scaled_init_for_output_weights: bool,
        activation: str,
        apply_residual_post_layernorm: bool = True,
        embedding_size: int | None = None,
        groups: int | None = None,
    ) -> tuple[int, Normal]:
        """Make the embedding and the layers.

        Args:
            embedding_size: width of the embedding's tables; None = hidden_size.
            groups: sets of weights that the layers share, neighbours first; None = each layer has its own.

        Returns:
            The vocabulary's size, and how weights begin.
        """
        if vocab_size is None:
            raise ConfigError("model.cfg.vocab_size is not set and there is no tokenizer to take it from")
        init = Normal(initializer_range)
        output = Normal(init.std / math.sqrt(2 * hidden_layers)) if use_scaled_init_for_output_weights else init
        self.vocab_size, self.max_seq_length, self.hidden_layers = vocab_size, max_seq_length, hidden_layers
        self.embedding = BertEmbedding(
            vocab_size, max_seq_length, num_tokentypes, embedding_size or hidden_size, hidden_size, embedding_dropout_prob,
            layernorm_epsilon if apply_residual_post_layernorm else None, init, self.position_offset,
        )  # fmt: skip
        arguments: dict[str, Any] = {
            "hidden_size": hidden_size,
            "ffn_hidden_size": ffn_hidden_size or 4 * hidden_size,
            "num_attention_heads": num_attention_heads,
            "attention_dropout_prob": attention_dropout_prob,
            "output_dropout_prob": output_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon,
            "activation": activation,
            "post_norm": apply_residual_post_layernorm,
            "init": init,
            "output_init": output,
        }
        if groups is None:
            self.layers = nn.ModuleList(TransformerUnit(index, **arguments) for index in range(hidden_layers))
        else:
            blocks = [TransformerLayer(**arguments) for _ in range(groups)]
            self.layers = nn.ModuleList(SharedUnit(i, blocks[i * groups // hidden_layers]) for i in range(hidden_layers))
        return vocab_size, init

    def units(self) -> dict[str, nn.Module]:
        """Return embedding, layers and head by name."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"embedding": self.embedding, **layers, "head": self.head}
