"""Qwen 2, 2.5 and 3: Llama's network with biases of query, key and value, or with norms of each head's query and key."""

from __future__ import annotations

from typing import Any

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.models.rotary_decoder import RotaryDecoder


@register_model("qwen2")
class Qwen2(RotaryDecoder):
    """Qwen 2 and 2.5 (Yang et al., "Qwen2 technical report", 2024) for language modelling.

    Args:
        sliding_window: in the layers from max_window_layers on, a token attends to the last so many tokens up to itself; None = all do
            to all.
        max_window_layers: layers from the first that attend to all tokens in any case.
    """

    qkv_bias, head_norm = True, False

    @configurable
    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_layers: int = 28,
        hidden_size: int = 3584,
        ffn_hidden_size: int = 18944,
        num_attention_heads: int = 28,
        num_key_value_heads: int | None = 4,
        head_size: int | None = None,
        max_seq_length: int = 32768,
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
        sliding_window: int | None = None,
        max_window_layers: int = 28,
    ) -> None:
        windows = window_of_layers(hidden_layers, sliding_window, max_window_layers)
        super().__init__(
            vocab_size, hidden_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_key_value_heads, head_size,
            max_seq_length, embedding_dropout_prob, attention_dropout_prob, output_dropout_prob, layernorm_epsilon, initializer_range,
            use_scaled_init_for_output_weights, activation, rotary_base, rotary_scaling, tie_word_embeddings,
            qkv_bias=self.qkv_bias, head_norm=self.head_norm, windows=windows,
        )  # fmt: skip


@register_model("qwen3")
class Qwen3(Qwen2):
    """Qwen 3 (Yang et al., "Qwen3 technical report", 2025): no biases, and a norm of each head's query and key."""

    qkv_bias, head_norm = False, True


def window_of_layers(layers: int, window: int | None, first: int) -> list[int | None]:
    """Return the window of each layer: none before layer `first`."""
    return [window if index >= first else None for index in range(layers)]
