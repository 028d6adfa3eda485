"""Llama: rotary positions, root-mean-square norms, gated feed-forward parts, grouped key-value heads, no biases; or a mixture of experts."""

from __future__ import annotations

from typing import Any, Literal

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.models.mixture import mixture_from
from dufu.models.rotary_decoder import RotaryDecoder


def inner_width(hidden_size: int) -> int:
    """Return Llama's inner width: two thirds of 4 × hidden_size, rounded up to a multiple of 256."""
    return -(-(8 * hidden_size // 3) // 256) * 256


@register_model("llama")
class Llama(RotaryDecoder):
    """Llama for language modelling, dense or with mixtures of experts as in Mixtral.

    Args:
        ffn_hidden_size: inner width of the gated feed-forward part; None = two thirds of 4 × hidden_size, to the next multiple of 256.
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
        super().__init__(
            vocab_size, hidden_layers, hidden_size, ffn_hidden_size or inner_width(hidden_size), num_attention_heads,
            num_key_value_heads, head_size, max_seq_length, embedding_dropout_prob, attention_dropout_prob, output_dropout_prob,
            layernorm_epsilon, initializer_range, use_scaled_init_for_output_weights, activation, rotary_base, rotary_scaling,
            tie_word_embeddings, mixture=mixture,
        )  # fmt: skip
