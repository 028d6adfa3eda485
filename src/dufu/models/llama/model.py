"""Llama: rotary positions, root-mean-square norms, gated feed-forward parts, grouped key-value heads, no biases; or a mixture of experts."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.errors import ConfigError, LayoutError
from dufu.layers.dropout import Dropout
from dufu.layers.embedding import VocabEmbedding
from dufu.layers.head import OutputEmbedding
from dufu.layers.initial import Normal
from dufu.layers.mlp import GatedMLP
from dufu.layers.norm import RMSNorm
from dufu.layers.rotary import Llama3Scaling, RotaryEmbedding
from dufu.models.chain import Batch, ChainModel
from dufu.models.decoder import ROTATION, DecoderHead, DecoderUnit
from dufu.models.mixture import mixture_from


class LlamaEmbedding(nn.Module):
    """Words, then dropout: ids (B, T) → (B, T, H)."""

    def __init__(self, vocab_size: int, hidden_size: int, dropout: float, init: Normal) -> None:
        super().__init__()
        self.word = VocabEmbedding(vocab_size, hidden_size, init=init)
        self.dropout = Dropout(dropout)

    def forward(self, state: None, batch: Batch) -> Tensor:
        """Embed the batch's tokens."""
        hidden: Tensor = self.dropout(self.word(batch.input_ids), batch.keys)
        return hidden


def inner_width(hidden_size: int) -> int:
    """Return Llama's inner width: two thirds of 4 × hidden_size, rounded up to a multiple of 256."""
    return -(-(8 * hidden_size // 3) // 256) * 256


def _scaling(settings: dict[str, Any] | None) -> Llama3Scaling | None:
    if settings is None:
        return None
    try:
        return Llama3Scaling(**settings)
    except TypeError:
        known = ", ".join(Llama3Scaling.__dataclass_fields__)
        raise ConfigError(f"model.cfg.rotary_scaling={dict(settings)}: the keys are {known}") from None


@register_model("llama")
class Llama(ChainModel):
    """Llama for language modelling, dense or with mixtures of experts as in Mixtral.

    Args:
        vocab_size: words; None = the tokenizer's.
        hidden_layers: number of layers.
        hidden_size: width.
        ffn_hidden_size: inner width of the gated feed-forward part; None = two thirds of 4 × hidden_size, to the next multiple of 256.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; None = as many as query heads.
        head_size: features of a head; None = hidden_size / num_attention_heads.
        max_seq_length: longest sample in tokens.
        embedding_dropout_prob: dropout after the embedding.
        attention_dropout_prob: dropout on attention probabilities.
        output_dropout_prob: dropout on each branch before it is added.
        layernorm_epsilon: added to the mean square in the norms.
        initializer_range: standard deviation of the initial weights.
        use_scaled_init_for_output_weights: divide that of the output projections by √(2 · hidden_layers).
        activation: of the gate.
        rotary_base: the slowest wave length of the rotation is about 2π · rotary_base tokens.
        rotary_scaling: Llama 3.1's change of the frequencies for long contexts: factor, low_freq_factor, high_freq_factor and
            original_length; None = none.
        tie_word_embeddings: whether the head uses the word embedding.
        num_experts: experts of each layer's feed-forward part, a mixture of experts; 0 = dense.
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
        hidden_layers: int = 32,
        hidden_size: int = 4096,
        ffn_hidden_size: int | None = None,
        num_attention_heads: int = 32,
        num_key_value_heads: int | None = None,
        head_size: int | None = None,
        max_seq_length: int = 2048,
        embedding_dropout_prob: float = 0.0,
        attention_dropout_prob: float = 0.0,
        output_dropout_prob: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_scaled_init_for_output_weights: bool = True,
        activation: str = "silu",
        rotary_base: float = 10000.0,
        rotary_scaling: dict[str, Any] | None = None,
        tie_word_embeddings: bool = False,
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
        inner = ffn_hidden_size or inner_width(hidden_size)
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

        def feed_forward(index: int) -> nn.Module:
            mixed = mixture.layer(index, hidden_size, inner, activation, True, init, output) if mixture else None
            return mixed or GatedMLP(hidden_size, inner, activation, init=init, output_init=output)

        self.vocab_size, self.max_seq_length, self.hidden_layers = vocab_size, max_seq_length, hidden_layers
        self.rotary = RotaryEmbedding(head_size or hidden_size // num_attention_heads, rotary_base, _scaling(rotary_scaling))
        self.embedding = LlamaEmbedding(vocab_size, hidden_size, embedding_dropout_prob, init)
        self.layers = nn.ModuleList(
            DecoderUnit(
                index,
                hidden_size=hidden_size,
                ffn_hidden_size=inner,
                num_attention_heads=num_attention_heads,
                attention_dropout_prob=attention_dropout_prob,
                output_dropout_prob=output_dropout_prob,
                layernorm_epsilon=layernorm_epsilon,
                init=init,
                output_init=output,
                num_key_value_heads=num_key_value_heads,
                head_size=head_size,
                bias=False,
                norm=RMSNorm,
                mlp=feed_forward(index),
            )
            for index in range(hidden_layers)
        )
        word = self.embedding.word if tie_word_embeddings else OutputEmbedding(vocab_size, hidden_size, init)
        self.head = DecoderHead(RMSNorm(hidden_size, layernorm_epsilon), word, vocab_size, mixture)
        self.objectives = self.head.objectives
        self.finish()

    def units(self) -> dict[str, nn.Module]:
        """Return embedding, layers and head by name."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"embedding": self.embedding, **layers, "head": self.head}

    def prepare(self, batch: Batch) -> Batch:
        """See ChainModel; the rotation of the batch's positions is computed once for all layers.

        Raises:
            LayoutError: more tokens than max_seq_length.
        """
        length = batch.input_ids.shape[1]
        if batch.held is None and length > self.max_seq_length:
            raise LayoutError(
                f"{length} tokens do not fit into max_seq_length={self.max_seq_length}; set it to {length} or cut the text"
            )
        batch = super().prepare(batch)
        assert batch.positions is not None
        batch.extra = {**batch.extra, ROTATION: torch.stack(self.rotary(batch.positions))}
        return batch
