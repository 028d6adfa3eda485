"""OPT: learned positions that begin at the table's third row, and ReLU."""

from __future__ import annotations

import math

from torch import Tensor, nn

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.layers.dropout import Dropout
from dufu.layers.embedding import VocabEmbedding
from dufu.layers.head import OutputEmbedding
from dufu.layers.initial import Normal
from dufu.layers.linear import Linear
from dufu.layers.norm import LayerNorm
from dufu.layers.position import LearnedPositionalEmbedding
from dufu.models.chain import Batch
from dufu.models.decoder import Decoder, DecoderHead, DecoderUnit, known_vocabulary

OFFSET = 2  # the table's rows before that of the first position


class OPTEmbedding(nn.Module):
    """Word, brought to the layers' width, plus position, then dropout: ids (B, T) → (B, T, H)."""

    def __init__(self, vocab_size: int, embedding_size: int, hidden_size: int, longest: int, dropout: float, init: Normal) -> None:
        super().__init__()
        self.word = VocabEmbedding(vocab_size, embedding_size, init=init)
        self.project = Linear(embedding_size, hidden_size, bias=False, init=init) if embedding_size != hidden_size else None
        self.position = LearnedPositionalEmbedding(longest, hidden_size, init=init, offset=OFFSET)
        self.dropout = Dropout(dropout)

    def forward(self, state: None, batch: Batch) -> Tensor:
        """Embed the batch's tokens."""
        words = self.word(batch.input_ids)
        words = words if self.project is None else self.project(words)
        hidden: Tensor = self.dropout(words + self.position(batch.positions), batch.keys)
        return hidden


@register_model("opt")
class OPT(Decoder):
    """OPT (Zhang et al., "OPT: open pre-trained transformer language models", 2022) for language modelling.

    Args:
        vocab_size: words; None = the tokenizer's.
        hidden_layers: number of layers.
        hidden_size: width.
        ffn_hidden_size: inner width of the feed-forward part; None = 4 × hidden_size.
        embedding_size: width of the word embedding and of what the head compares with it; None = hidden_size.
        num_attention_heads: heads.
        max_seq_length: longest sample in tokens.
        embedding_dropout_prob: dropout after the embedding.
        attention_dropout_prob: dropout on attention probabilities.
        output_dropout_prob: dropout on each branch before it is added.
        layernorm_epsilon: added to the variance in the norms.
        initializer_range: standard deviation of the initial weights.
        use_scaled_init_for_output_weights: divide that of the output projections by √(2 · hidden_layers).
        activation: of the feed-forward part.
        post_norm: norms after each branch is added, and none before the head, as the 350M model has it.
        tie_word_embeddings: whether the head uses the word embedding.
    """

    @configurable
    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_layers: int = 12,
        hidden_size: int = 768,
        ffn_hidden_size: int | None = None,
        embedding_size: int | None = None,
        num_attention_heads: int = 12,
        max_seq_length: int = 2048,
        embedding_dropout_prob: float = 0.0,
        attention_dropout_prob: float = 0.0,
        output_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_scaled_init_for_output_weights: bool = True,
        activation: str = "relu",
        post_norm: bool = False,
        tie_word_embeddings: bool = True,
    ) -> None:
        super().__init__()
        words, init = known_vocabulary(vocab_size), Normal(initializer_range)
        output = Normal(initializer_range / math.sqrt(2 * hidden_layers)) if use_scaled_init_for_output_weights else init
        inner, width = ffn_hidden_size or 4 * hidden_size, embedding_size or hidden_size
        embedding = OPTEmbedding(words, width, hidden_size, max_seq_length, embedding_dropout_prob, init)
        layers = [
            DecoderUnit(
                index,
                hidden_size=hidden_size,
                ffn_hidden_size=inner,
                num_attention_heads=num_attention_heads,
                attention_dropout_prob=attention_dropout_prob,
                output_dropout_prob=output_dropout_prob,
                layernorm_epsilon=layernorm_epsilon,
                activation=activation,
                post_norm=post_norm,
                init=init,
                output_init=output,
            )
            for index in range(hidden_layers)
        ]
        norm = nn.Identity() if post_norm else LayerNorm(hidden_size, layernorm_epsilon)
        word = embedding.word if tie_word_embeddings else OutputEmbedding(words, width, init)
        project = Linear(hidden_size, width, bias=False, init=init) if width != hidden_size else None
        self.compose(embedding, layers, DecoderHead(norm, word, words, project=project), max_seq_length)
