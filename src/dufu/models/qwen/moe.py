"""Qwen's mixtures of experts."""

from __future__ import annotations

from typing import Any

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.models.mixture import mixture_from
from dufu.models.rotary_decoder import RotaryDecoder


@register_model("qwen2_moe")
class Qwen2Moe(RotaryDecoder):
    """Qwen 1.5 and 2 with mixtures of experts (Yang et al., "Qwen2 technical report", 2024): biases of query, key and value.

    Args:
        moe_shared_experts: experts' widths that all tokens share beside the chosen ones, multiplied by a sigmoid of the token.
    """

    qkv_bias, head_norm = True, False

    @configurable
    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_layers: int = 24,
        hidden_size: int = 2048,
        ffn_hidden_size: int = 5632,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_size: int | None = None,
        max_seq_length: int = 8192,
        embedding_dropout_prob: float = 0.0,
        attention_dropout_prob: float = 0.0,
        output_dropout_prob: float = 0.0,
        layernorm_epsilon: float = 1e-6,
        initializer_range: float = 0.02,
        use_scaled_init_for_output_weights: bool = True,
        activation: str = "silu",
        rotary_base: float = 1000000.0,
        rotary_scaling: dict[str, Any] | None = None,
        tie_word_embeddings: bool = False,
        num_experts: int = 60,
        moe_top_k: int = 4,
        moe_ffn_hidden_size: int = 1408,
        moe_shared_experts: int = 0,
        moe_renormalize: bool = False,
        moe_first_dense_layers: int = 0,
        moe_balance_weight: float = 0.001,
        moe_z_weight: float = 0.0,
    ) -> None:
        mixture = mixture_from(
            num_experts, hidden_layers, top_k=moe_top_k, ffn_hidden_size=moe_ffn_hidden_size, shared_experts=moe_shared_experts,
            shared_gate=True, renormalize=moe_renormalize, first_dense_layers=moe_first_dense_layers,
            balance_weight=moe_balance_weight, z_weight=moe_z_weight,
        )  # fmt: skip
        super().__init__(
            vocab_size, hidden_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_key_value_heads, head_size,
            max_seq_length, embedding_dropout_prob, attention_dropout_prob, output_dropout_prob, layernorm_epsilon, initializer_range,
            use_scaled_init_for_output_weights, activation, rotary_base, rotary_scaling, tie_word_embeddings,
            mixture=mixture, qkv_bias=self.qkv_bias, head_norm=self.head_norm,
        )  # fmt: skip


@register_model("qwen3_moe")
class Qwen3Moe(Qwen2Moe):
    """Qwen 3 with mixtures of experts (Yang et al., "Qwen3 technical report", 2025): no biases, norms of each head's query and key."""

    qkv_bias, head_norm = False, True
