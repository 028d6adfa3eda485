"""Gemma: Llama's network with a scaled word embedding, norms that train a difference from one, and GELU gates."""

from __future__ import annotations

from functools import partial
from typing import Any

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.layers.norm import RMSNorm
from dufu.models.rotary_decoder import RotaryDecoder


@register_model("gemma")
class Gemma(RotaryDecoder):
    """Gemma 1 (Gemma Team, "Gemma: open models based on Gemini research and technology", 2024) for language modelling."""

    @configurable
    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_layers: int = 28,
        hidden_size: int = 3072,
        ffn_hidden_size: int = 24576,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_size: int | None = 256,
        max_seq_length: int = 8192,
        embedding_dropout_prob: float = 0.0,
        attention_dropout_prob: float = 0.0,
        output_dropout_prob: float = 0.0,
        layernorm_epsilon: float = 1e-6,
        initializer_range: float = 0.02,
        use_scaled_init_for_output_weights: bool = True,
        activation: str = "gelu_tanh",
        rotary_base: float = 10000.0,
        rotary_scaling: dict[str, Any] | None = None,
        tie_word_embeddings: bool = True,
    ) -> None:
        super().__init__(
            vocab_size, hidden_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_key_value_heads, head_size,
            max_seq_length, embedding_dropout_prob, attention_dropout_prob, output_dropout_prob, layernorm_epsilon, initializer_range,
            use_scaled_init_for_output_weights, activation, rotary_base, rotary_scaling, tie_word_embeddings,
            norm=partial(RMSNorm, offset=1.0), embedding_scale=hidden_size**0.5,
        )  # fmt: skip
