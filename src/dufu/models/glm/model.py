"""GLM-4, and the network of ChatGLM 2 and 3: Llama's network with biases of query, key and value, half of each head's features rotated."""

from __future__ import annotations

from typing import Any

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.models.rotary_decoder import RotaryDecoder


@register_model("glm")
class Glm(RotaryDecoder):
    """GLM-4 (GLM Team, "ChatGLM: a family of large language models", 2024) for language modelling.

    Args:
        partial_rotary_factor: share of a head's features that is rotated, from the first.
        qkv_bias: whether the projections of query, key and value have biases.
    """

    branch_norm = False

    @configurable
    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_layers: int = 40,
        hidden_size: int = 4096,
        ffn_hidden_size: int = 13696,
        num_attention_heads: int = 32,
        num_key_value_heads: int | None = 2,
        head_size: int | None = 128,
        max_seq_length: int = 131072,
        embedding_dropout_prob: float = 0.0,
        attention_dropout_prob: float = 0.0,
        output_dropout_prob: float = 0.0,
        layernorm_epsilon: float = 1.5625e-07,
        initializer_range: float = 0.02,
        use_scaled_init_for_output_weights: bool = True,
        activation: str = "silu",
        rotary_base: float = 10000.0,
        rotary_scaling: dict[str, Any] | None = None,
        tie_word_embeddings: bool = False,
        partial_rotary_factor: float = 0.5,
        qkv_bias: bool = True,
    ) -> None:
        rotary_size = int((head_size or hidden_size // num_attention_heads) * partial_rotary_factor)
        super().__init__(
            vocab_size, hidden_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_key_value_heads, head_size,
            max_seq_length, embedding_dropout_prob, attention_dropout_prob, output_dropout_prob, layernorm_epsilon, initializer_range,
            use_scaled_init_for_output_weights, activation, rotary_base, rotary_scaling, tie_word_embeddings,
            qkv_bias=qkv_bias, rotary_size=rotary_size, branch_norm=self.branch_norm,
        )  # fmt: skip


@register_model("glm4")
class Glm4(Glm):
    """GLM-4-0414: GLM-4 with a second norm on what each branch adds."""

    branch_norm = True
