"""GPT-2: learned positions, pre-norm layers, a head tied to the word embedding."""

from __future__ import annotations

import math

from torch import Tensor, nn

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.errors import ConfigError
from dufu.layers.dropout import Dropout
from dufu.layers.embedding import VocabEmbedding
from dufu.layers.head import LMLogits, OutputEmbedding
from dufu.layers.initial import Normal
from dufu.layers.loss import IGNORE, cross_entropy_sum, divided_argmax
from dufu.layers.norm import LayerNorm
from dufu.layers.position import LearnedPositionalEmbedding
from dufu.models.chain import Batch, ChainModel, Sums, TransformerUnit


class GPT2Embedding(nn.Module):
    """Word plus position, then dropout: ids (B, T) → (B, T, H)."""

    def __init__(self, vocab_size: int, hidden_size: int, max_length: int, dropout: float, init: Normal) -> None:
        super().__init__()
        self.word = VocabEmbedding(vocab_size, hidden_size, init=init)
        self.position = LearnedPositionalEmbedding(max_length, hidden_size, init=init)
        self.dropout = Dropout(dropout)

    def forward(self, state: None, batch: Batch) -> Tensor:
        """Embed the batch's tokens."""
        hidden: Tensor = self.dropout(self.word(batch.input_ids) + self.position(batch.positions), batch.keys)
        return hidden


class GPT2Head(nn.Module):
    """Final norm, then scores against the word embedding (tied) or a matrix of its own."""

    def __init__(self, word: VocabEmbedding | OutputEmbedding, vocab_size: int, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.norm = LayerNorm(hidden_size, epsilon)
        self.word = word
        self.logits = LMLogits(vocab_size)

    def forward(self, state: Tensor, batch: Batch) -> Tensor | Sums:
        """Sums of loss and tokens when there are labels, otherwise scores over the whole vocabulary."""
        if batch.last_only:
            state = state[:, -1:]
        scores = self.logits(self.norm(state), self.word.weight)
        if batch.labels is None:
            return self.logits.whole(scores)
        flat, labels = scores.flatten(0, 1), batch.labels.flatten()
        vocab, split = self.logits.vocab_size, self.logits.split
        scored = labels != IGNORE
        sums: Sums = {"loss": cross_entropy_sum(flat, labels, split=split, vocab_size=vocab), "tokens": scored.sum()}
        if not self.training:
            sums["correct"] = ((divided_argmax(flat.detach(), split, vocab) == labels) & scored).sum()
        return sums


@register_model("gpt2")
class GPT2(ChainModel):
    """GPT-2 for language modelling.

    Args:
        vocab_size: words; None = the tokenizer's.
        hidden_layers: number of layers.
        hidden_size: width.
        ffn_hidden_size: inner width of the feed-forward part; None = 4 × hidden_size.
        num_attention_heads: heads.
        max_seq_length: longest sample in tokens.
        embedding_dropout_prob: dropout after the embedding.
        attention_dropout_prob: dropout on attention probabilities.
        output_dropout_prob: dropout on each branch before it is added.
        layernorm_epsilon: added to the variance in the norms.
        initializer_range: standard deviation of the initial weights.
        use_scaled_init_for_output_weights: divide that of the output projections by √(2 · hidden_layers).
        activation: of the feed-forward part.
        tie_word_embeddings: whether the head uses the word embedding.
    """

    @configurable
    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_layers: int = 12,
        hidden_size: int = 768,
        ffn_hidden_size: int | None = None,
        num_attention_heads: int = 12,
        max_seq_length: int = 1024,
        embedding_dropout_prob: float = 0.1,
        attention_dropout_prob: float = 0.1,
        output_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_scaled_init_for_output_weights: bool = True,
        activation: str = "gelu_tanh",
        tie_word_embeddings: bool = True,
    ) -> None:
        super().__init__()
        if vocab_size is None:
            raise ConfigError("model.cfg.vocab_size is not set and there is no tokenizer to take it from")
        init = Normal(initializer_range)
        output = Normal(initializer_range / math.sqrt(2 * hidden_layers)) if use_scaled_init_for_output_weights else init
        self.vocab_size, self.max_seq_length, self.hidden_layers = vocab_size, max_seq_length, hidden_layers
        self.embedding = GPT2Embedding(vocab_size, hidden_size, max_seq_length, embedding_dropout_prob, init)
        self.layers = nn.ModuleList(
            TransformerUnit(
                index,
                hidden_size=hidden_size,
                ffn_hidden_size=ffn_hidden_size or 4 * hidden_size,
                num_attention_heads=num_attention_heads,
                attention_dropout_prob=attention_dropout_prob,
                output_dropout_prob=output_dropout_prob,
                layernorm_epsilon=layernorm_epsilon,
                activation=activation,
                init=init,
                output_init=output,
            )
            for index in range(hidden_layers)
        )
        word = self.embedding.word if tie_word_embeddings else OutputEmbedding(vocab_size, hidden_size, init)
        self.head = GPT2Head(word, vocab_size, hidden_size, layernorm_epsilon)
        self.finish()

    def units(self) -> dict[str, nn.Module]:
        """Return embedding, layers and head by name."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"embedding": self.embedding, **layers, "head": self.head}
