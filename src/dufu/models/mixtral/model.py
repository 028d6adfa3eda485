"""Mixtral: Mistral's network with mixtures of experts."""

from __future__ import annotations

from typing import Any

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.models.mixture import mixture_from
from dufu.models.rotary_decoder import RotaryDecoder


@register_model("mixtral")
class Mixtral(RotaryDecoder):
    """Mixtral (Jiang et al., "Mixtral of experts", 2024) for language modelling; the chosen experts' weights sum to 1."""

    @configurable
    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_layers: int = 32,
        hidden_size: int = 4096,
        ffn_hidden_size: int = 14336,
        num_attention_heads: int = 32,
        num_key_value_heads: int | None = 8,
        head_size: int | None = None,
        max_seq_length: int = 32768,
        embedding_dropout_prob: float = 0.0,
        attention_dropout_prob: float = 0.0,
        output_dropout_prob: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_scaled_init_for_output_weights: bool = True,
        activation: str = "silu",
        rotary_base: float = 1000000.0,
        rotary_scaling: dict[str, Any] | None = None,
        tie_word_embeddings: bool = False,
        sliding_window: int | None = None,
        num_experts: int = 8,
        moe_top_k: int = 2,
        moe_balance_weight: float = 0.02,
        moe_z_weight: float = 0.0,
    ) -> None:
        mixture = mixture_from(
            num_experts, hidden_layers, top_k=moe_top_k, renormalize=True, balance_weight=moe_balance_weight, z_weight=moe_z_weight
        )
        super().__init__(
            vocab_size, hidden_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_key_value_heads, head_size,
            max_seq_length, embedding_dropout_prob, attention_dropout_prob, output_dropout_prob, layernorm_epsilon, initializer_range,
            use_scaled_init_for_output_weights, activation, rotary_base, rotary_scaling, tie_word_embeddings,
            mixture=mixture, windows=[sliding_window] * hidden_layers,
        )  # fmt: skip
