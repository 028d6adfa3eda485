"""Decoders with rotary positions and gated feed-forward parts: Llama and its likes, which differ in a few settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from dufu.layers.head import OutputEmbedding
from dufu.layers.initial import Normal
from dufu.layers.mlp import GatedMLP
from dufu.layers.norm import HeadRMSNorm, RMSNorm
from dufu.layers.rotary import RotaryEmbedding, build_scaling
from dufu.models.decoder import Decoder, DecoderHead, DecoderUnit, WordEmbedding, known_vocabulary
from dufu.models.mixture import Mixture


class RotaryDecoder(Decoder):
    """A pre-norm decoder with rotary positions (Touvron et al., "LLaMA", 2023), and the settings in which families differ.

    Args:
        vocab_size: words; None = the tokenizer's.
        hidden_layers: number of layers.
        hidden_size: width.
        ffn_hidden_size: inner width of the gated feed-forward part.
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
        rotary_scaling: a change of the frequencies for long contexts: `kind` ("llama3" where none is given, "linear" or "yarn") and its
            numbers; for llama3 factor, low_freq_factor, high_freq_factor and original_length; None = none.
        tie_word_embeddings: whether the head uses the word embedding.
        sliding_window: a token attends to the last so many tokens up to itself; None = all.
        num_experts: experts of each layer's feed-forward part, a mixture of experts.
        moe_top_k: experts of each token.
        moe_ffn_hidden_size: inner width of one expert.
        moe_renormalize: whether the chosen experts' weights are divided by their sum.
        moe_first_dense_layers: layers from the first that stay dense.
        moe_balance_weight: factor of the balance loss.
        moe_z_weight: factor of the router's z-loss.
        mixture: of the layers; None = dense.
        norm: makes a norm from a width and an epsilon.
        qkv_bias, output_bias: whether the projections of attention have biases.
        head_norm: whether each head's query and key are normed.
        windows: for each layer how many tokens back it sees; None = all layers see all.
        rotary_size: features of a head that are rotated; None = all.
        embedding_scale: factor on the word embedding.
        branch_norm: see TransformerLayer.
    """

    def __init__(
        self,
        vocab_size: int | None,
        hidden_layers: int,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int | None,
        head_size: int | None,
        max_seq_length: int,
        embedding_dropout_prob: float,
        attention_dropout_prob: float,
        output_dropout_prob: float,
        layernorm_epsilon: float,
        initializer_range: float,
        use_scaled_init_for_output_weights: bool,
        activation: str,
        rotary_base: float,
        rotary_scaling: Mapping[str, Any] | None,
        tie_word_embeddings: bool,
        *,
        mixture: Mixture | None = None,
        norm: Callable[[int, float], nn.Module] = RMSNorm,
        qkv_bias: bool = False,
        output_bias: bool = False,
        head_norm: bool = False,
        windows: Sequence[int | None] | None = None,
        rotary_size: int | None = None,
        embedding_scale: float = 1.0,
        branch_norm: bool = False,
    ) -> None:
        super().__init__()
        words, init = known_vocabulary(vocab_size), Normal(initializer_range)
        output = Normal(initializer_range / math.sqrt(2 * hidden_layers)) if use_scaled_init_for_output_weights else init

        def feed_forward(index: int) -> nn.Module:
            mixed = mixture.layer(index, hidden_size, ffn_hidden_size, activation, True, init, output) if mixture else None
            return mixed or GatedMLP(hidden_size, ffn_hidden_size, activation, init=init, output_init=output)

        embedding = WordEmbedding(words, hidden_size, embedding_dropout_prob, init, embedding_scale)
        layers = [
            DecoderUnit(
                index,
                hidden_size=hidden_size,
                ffn_hidden_size=ffn_hidden_size,
                num_attention_heads=num_attention_heads,
                attention_dropout_prob=attention_dropout_prob,
                output_dropout_prob=output_dropout_prob,
                layernorm_epsilon=layernorm_epsilon,
                init=init,
                output_init=output,
                num_key_value_heads=num_key_value_heads,
                head_size=head_size,
                bias=qkv_bias,
                output_bias=output_bias,
                head_norm=partial(HeadRMSNorm, eps=layernorm_epsilon) if head_norm else None,
                window=windows[index] if windows else None,
                norm=norm,
                mlp=feed_forward(index),
                branch_norm=branch_norm,
            )
            for index in range(hidden_layers)
        ]
        word = embedding.word if tie_word_embeddings else OutputEmbedding(words, hidden_size, init)
        head = DecoderHead(norm(hidden_size, layernorm_epsilon), word, words, mixture)
        turned = rotary_size or head_size or hidden_size // num_attention_heads
        rotary = RotaryEmbedding(turned, rotary_base, build_scaling(rotary_scaling))
        self.compose(embedding, layers, head, max_seq_length, rotary)
