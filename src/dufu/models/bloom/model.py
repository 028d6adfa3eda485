"""BLOOM: no position embedding, but scores that fall with distance (ALiBi), and a norm of the word embedding."""

from __future__ import annotations

import math

from torch import Tensor, nn

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.layers.bias import AlibiBias
from dufu.layers.dropout import Dropout
from dufu.layers.embedding import VocabEmbedding
from dufu.layers.head import OutputEmbedding
from dufu.layers.initial import Normal
from dufu.layers.norm import LayerNorm
from dufu.models.chain import Batch
from dufu.models.decoder import Decoder, DecoderHead, DecoderUnit, known_vocabulary


class BloomEmbedding(nn.Module):
    """Words, normed, then dropout: ids (B, T) → (B, T, H)."""

    def __init__(self, vocab_size: int, hidden_size: int, epsilon: float, dropout: float, init: Normal) -> None:
        super().__init__()
        self.word = VocabEmbedding(vocab_size, hidden_size, init=init)
        self.norm = LayerNorm(hidden_size, epsilon)
        self.dropout = Dropout(dropout)

    def forward(self, state: None, batch: Batch) -> Tensor:
        """Embed the batch's tokens."""
        hidden: Tensor = self.dropout(self.norm(self.word(batch.input_ids)), batch.keys)
        return hidden


@register_model("bloom")
class Bloom(Decoder):
    """BLOOM (Le Scao et al., "BLOOM: a 176B-parameter open-access multilingual language model", 2022) for language modelling.

    Args:
        vocab_size: words; None = the tokenizer's.
        hidden_layers: number of layers.
        hidden_size: width; the feed-forward part's inner width is four times as much.
        num_attention_heads: heads.
        max_seq_length: longest sample in tokens; no weight depends on it.
        embedding_dropout_prob: dropout after the embedding.
        attention_dropout_prob: dropout on attention probabilities.
        output_dropout_prob: dropout on each branch before it is added.
        layernorm_epsilon: added to the variance in the norms.
        initializer_range: standard deviation of the initial weights.
        use_scaled_init_for_output_weights: divide that of the output projections by √(2 · hidden_layers).
        tie_word_embeddings: whether the head uses the word embedding.
    """

    @configurable
    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_layers: int = 24,
        hidden_size: int = 1024,
        num_attention_heads: int = 16,
        max_seq_length: int = 2048,
        embedding_dropout_prob: float = 0.0,
        attention_dropout_prob: float = 0.0,
        output_dropout_prob: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_scaled_init_for_output_weights: bool = True,
        tie_word_embeddings: bool = True,
    ) -> None:
        super().__init__()
        words, init = known_vocabulary(vocab_size), Normal(initializer_range)
        output = Normal(initializer_range / math.sqrt(2 * hidden_layers)) if use_scaled_init_for_output_weights else init
        embedding = BloomEmbedding(words, hidden_size, layernorm_epsilon, embedding_dropout_prob, init)
        layers = [
            DecoderUnit(
                index,
                hidden_size=hidden_size,
                ffn_hidden_size=4 * hidden_size,
                num_attention_heads=num_attention_heads,
                attention_dropout_prob=attention_dropout_prob,
                output_dropout_prob=output_dropout_prob,
                layernorm_epsilon=layernorm_epsilon,
                activation="gelu_tanh",
                init=init,
                output_init=output,
            )
            for index in range(hidden_layers)
        ]
        word = embedding.word if tie_word_embeddings else OutputEmbedding(words, hidden_size, init)
        head = DecoderHead(LayerNorm(hidden_size, layernorm_epsilon), word, words)
        self.compose(embedding, layers, head, max_seq_length, alibi=AlibiBias(num_attention_heads))
