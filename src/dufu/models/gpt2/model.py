"""GPT-2: learned positions, pre-norm layers, a head tied to the word embedding; optionally with mixtures of experts."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor, nn

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.errors import ConfigError
from dufu.layers.dropout import Dropout
from dufu.layers.embedding import VocabEmbedding
from dufu.layers.head import OutputEmbedding
from dufu.layers.initial import Normal
from dufu.layers.norm import LayerNorm
from dufu.layers.position import LearnedPositionalEmbedding
from dufu.models.chain import Batch, ChainModel
from dufu.models.decoder import DecoderHead, DecoderUnit
from dufu.models.mixture import mixture_from


class GPT2Embedding(nn.Module):
    """Word plus position, then dropout: ids (B, T) → (B, T, H)."""

    def __init__(self, vocab_size: int, hidden_size: int, max_length: int, dropout: float, init: Normal) -> None:
        super().__init__()
        self.word = VocabEmbedding(vocab_size, hidden_size, init=init)
        self.position = LearnedPositionalEmbedding(max_length, hidden_size, init=init)
        self.dropout = Dropout(dropout)

    def forward(self, state: None, batch: Batch) -> Tensor:
        """Embed the batch's tokens."""
        hidden: Tensor = self.dropout(self.word(batch.input_ids) + self.position(batch.positions), batch.keys)
        return hidden


@register_model("gpt2")
class GPT2(ChainModel):
    """GPT-2 for language modelling.

    Args:
        vocab_size: words; None = the tokenizer's.
        hidden_layers: number of layers.
        hidden_size: width.
        ffn_hidden_size: inner width of the feed-forward part; None = 4 × hidden_size.
        num_attention_heads: heads.
        max_seq_length: longest sample in tokens.
        embedding_dropout_prob: dropout after the embedding.
        attention_dropout_prob: dropout on attention probabilities.
        output_dropout_prob: dropout on each branch before it is added.
        layernorm_epsilon: added to the variance in the norms.
        initializer_range: standard deviation of the initial weights.
        use_scaled_init_for_output_weights: divide that of the output projections by √(2 · hidden_layers).
        activation: of the feed-forward part.
        tie_word_embeddings: whether the head uses the word embedding.
        num_experts: experts of each layer's feed-forward part, a mixture of experts; 0 = dense. Experts have no biases.
        moe_top_k: experts of each token; null = 2.
        moe_ffn_hidden_size: inner width of one expert; null = ffn_hidden_size.
        moe_shared_experts: experts' widths that all tokens share beside the chosen ones; null = 0.
        moe_first_dense_layers: layers from the first that stay dense; null = 0.
        moe_scoring: how experts are scored, "softmax" or "sigmoid"; null = softmax.
        moe_renormalize: whether the chosen experts' weights are divided by their sum; null = where moe_top_k > 1.
        moe_scale: factor on the weights; null = 1.
        moe_capacity_factor: an expert takes this many times its even share of each sample's tokens; null = no limit.
        moe_balance: what the balance loss compares: each "sample" by itself (null), or the "global" batch (not built).
        moe_balance_weight: factor of the balance loss; null = 0.01.
        moe_z_weight: factor of the router's z-loss; null = 0.001.
    """

    @configurable
    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_layers: int = 12,
        hidden_size: int = 768,
        ffn_hidden_size: int | None = None,
        num_attention_heads: int = 12,
        max_seq_length: int = 1024,
        embedding_dropout_prob: float = 0.1,
        attention_dropout_prob: float = 0.1,
        output_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_scaled_init_for_output_weights: bool = True,
        activation: str = "gelu_tanh",
        tie_word_embeddings: bool = True,
        num_experts: int = 0,
        moe_top_k: int | None = None,
        moe_ffn_hidden_size: int | None = None,
        moe_shared_experts: int | None = None,
        moe_first_dense_layers: int | None = None,
        moe_scoring: Literal["softmax", "sigmoid"] | None = None,
        moe_renormalize: bool | None = None,
        moe_scale: float | None = None,
        moe_capacity_factor: float | None = None,
        moe_balance: str | None = None,
        moe_balance_weight: float | None = None,
        moe_z_weight: float | None = None,
    ) -> None:
        super().__init__()
        if vocab_size is None:
            raise ConfigError("model.cfg.vocab_size is not set and there is no tokenizer to take it from")
        init = Normal(initializer_range)
        output = Normal(initializer_range / math.sqrt(2 * hidden_layers)) if use_scaled_init_for_output_weights else init
        inner = ffn_hidden_size or 4 * hidden_size
        mixture = mixture_from(
            num_experts,
            hidden_layers,
            top_k=moe_top_k,
            ffn_hidden_size=moe_ffn_hidden_size,
            shared_experts=moe_shared_experts,
            first_dense_layers=moe_first_dense_layers,
            scoring=moe_scoring,
            renormalize=moe_renormalize,
            scale=moe_scale,
            capacity_factor=moe_capacity_factor,
            balance=moe_balance,
            balance_weight=moe_balance_weight,
            z_weight=moe_z_weight,
        )
        self.vocab_size, self.max_seq_length, self.hidden_layers = vocab_size, max_seq_length, hidden_layers
        self.embedding = GPT2Embedding(vocab_size, hidden_size, max_seq_length, embedding_dropout_prob, init)
        self.layers = nn.ModuleList(
            DecoderUnit(
                index,
                hidden_size=hidden_size,
                ffn_hidden_size=inner,
                num_attention_heads=num_attention_heads,
                attention_dropout_prob=attention_dropout_prob,
                output_dropout_prob=output_dropout_prob,
                layernorm_epsilon=layernorm_epsilon,
                activation=activation,
                init=init,
                output_init=output,
                mlp=mixture and mixture.layer(index, hidden_size, inner, activation, False, init, output),
            )
            for index in range(hidden_layers)
        )
        word = self.embedding.word if tie_word_embeddings else OutputEmbedding(vocab_size, hidden_size, init)
        self.head = DecoderHead(LayerNorm(hidden_size, layernorm_epsilon), word, vocab_size, mixture)
        self.objectives = self.head.objectives
        self.finish()

    def units(self) -> dict[str, nn.Module]:
        """Return embedding, layers and head by name."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"embedding": self.embedding, **layers, "head": self.head}
