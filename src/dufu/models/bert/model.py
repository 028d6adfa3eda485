"""BERT: an encoder that sees both sides, trained to fill masked words and to judge a pair of sentences."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.errors import ConfigError
from dufu.layers.dropout import Dropout
from dufu.layers.embedding import Embedding, VocabEmbedding
from dufu.layers.head import LMLogits, Pooler
from dufu.layers.initial import Normal
from dufu.layers.linear import Linear
from dufu.layers.loss import IGNORE, cross_entropy_sum, divided_argmax
from dufu.layers.mlp import build_activation
from dufu.layers.norm import LayerNorm
from dufu.layers.position import LearnedPositionalEmbedding
from dufu.models.chain import Batch, ChainModel, Sums, TransformerUnit


class BertEmbedding(nn.Module):
    """Word plus position plus segment, norm (in the post-norm order), dropout: ids (B, T) → (B, T, H)."""

    def __init__(
        self, vocab_size: int, hidden_size: int, length: int, segments: int, dropout: float, epsilon: float | None, init: Normal
    ) -> None:
        super().__init__()
        self.word = VocabEmbedding(vocab_size, hidden_size, init=init)
        self.position = LearnedPositionalEmbedding(length, hidden_size, init=init)
        self.token_type = Embedding(segments, hidden_size, init=init) if segments else None
        self.norm = LayerNorm(hidden_size, epsilon) if epsilon is not None else None
        self.dropout = Dropout(dropout)

    def forward(self, state: None, batch: Batch) -> Tensor:
        """Embed the batch's tokens; without token types all are of segment 0."""
        hidden = self.word(batch.input_ids) + self.position(batch.positions)
        if self.token_type is not None:
            types = torch.zeros_like(batch.input_ids) if batch.token_types is None else batch.token_types
            hidden = hidden + self.token_type(types)
        if self.norm is not None:
            hidden = self.norm(hidden)
        embedded: Tensor = self.dropout(hidden, batch.keys)
        return embedded


class BertHead(nn.Module):
    """Scores of the masked words against the word embedding, and of the sentence pair from the first token."""

    def __init__(
        self,
        word: VocabEmbedding,
        vocab_size: int,
        hidden_size: int,
        epsilon: float,
        activation: str,
        pre_norm: bool,
        sentence_objective: bool,
        init: Normal,
    ) -> None:
        super().__init__()
        self.norm = LayerNorm(hidden_size, epsilon) if pre_norm else None
        self.transform = Linear(hidden_size, hidden_size, init=init)
        self.activation = build_activation(activation)
        self.transform_norm = LayerNorm(hidden_size, epsilon)
        self.word = word
        self.logits = LMLogits(vocab_size, bias=True)
        self.pooler = Pooler(hidden_size, init=init) if sentence_objective else None
        self.sentence = Linear(hidden_size, 2, init=init) if sentence_objective else None

    def _word_scores(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.logits(self.transform_norm(self.activation(self.transform(hidden))), self.word.weight)
        return scores

    def forward(self, state: Tensor, batch: Batch) -> Tensor | Sums:
        """Sums of the objectives when there are labels, otherwise the word scores (B, T, V)."""
        if self.norm is not None:
            state = self.norm(state)
        if batch.labels is None:
            return self.logits.whole(self._word_scores(state))
        scored = batch.labels != IGNORE
        labels = batch.labels[scored]
        # Few positions are scored: the product with the vocabulary is made for those alone.
        scores = self._word_scores(state[scored])
        vocab, split = self.logits.vocab_size, self.logits.split
        sums: Sums = {
            "lm_loss": cross_entropy_sum(scores, labels, split=split, vocab_size=vocab),
            "tokens": scored.sum(),
            "correct": (divided_argmax(scores.detach(), split, vocab) == labels).sum(),
        }
        if self.pooler is not None and self.sentence is not None:
            pair = _sentence_labels(batch)
            judged = self.sentence(self.pooler(state))
            sums["sentence_loss"] = cross_entropy_sum(judged, pair)
            sums["sentences"] = (pair != IGNORE).sum()
            sums["sentences_correct"] = ((judged.detach().argmax(-1) == pair) & (pair != IGNORE)).sum()
        return sums


class ClassifierHead(nn.Module):
    """Scores of classes, or one number, from the first token."""

    def __init__(self, hidden_size: int, num_labels: int, epsilon: float, dropout: float, pre_norm: bool, init: Normal) -> None:
        super().__init__()
        self.num_labels = num_labels
        self.norm = LayerNorm(hidden_size, epsilon) if pre_norm else None
        self.pooler = Pooler(hidden_size, init=init)
        self.dropout = Dropout(dropout)
        self.classes = Linear(hidden_size, num_labels, init=init)

    def forward(self, state: Tensor, batch: Batch) -> Tensor | Sums:
        """Sums when the batch has sentence labels, otherwise the scores (B, num_labels)."""
        if self.norm is not None:
            state = self.norm(state)
        pooled = self.pooler(state)
        scores: Tensor = self.classes(self.dropout(pooled, None if batch.keys is None else batch.keys[:, 0]))
        if "sentence_labels" not in batch.extra:
            return scores
        labels = batch.extra["sentence_labels"]
        scored = labels != IGNORE
        tokens = scored.sum() * batch.length if batch.padding is None else (batch.padding.bool() & scored[:, None]).sum()
        sums: Sums = {"sentences": scored.sum(), "tokens": tokens}
        if self.num_labels == 1:
            error = (scores[:, 0].float() - labels.float()).masked_fill(~scored, 0.0)
            return {"loss": error.square().sum(), **sums}
        right = ((scores.detach().argmax(-1) == labels) & scored).sum()
        return {"loss": cross_entropy_sum(scores, labels), **sums, "sentences_correct": right}


def _sentence_labels(batch: Batch) -> Tensor:
    if "sentence_labels" not in batch.extra:
        raise ConfigError(
            "model.cfg.sentence_objective=true, but the samples have no sentence_labels; set it to false, or let the dataset make them"
        )
    return batch.extra["sentence_labels"]


class _BertChain(ChainModel):
    """What BERT's models share: the embedding and the layers."""

    causal = False
    embedding: BertEmbedding
    layers: nn.ModuleList
    head: nn.Module

    def _build_encoder(
        self,
        vocab_size: int | None,
        hidden_layers: int,
        hidden_size: int,
        ffn_hidden_size: int | None,
        num_attention_heads: int,
        max_seq_length: int,
        num_tokentypes: int,
        embedding_dropout_prob: float,
        attention_dropout_prob: float,
        output_dropout_prob: float,
        layernorm_epsilon: float,
        init: Normal,
        use_scaled_init_for_output_weights: bool,
        activation: str,
        post_norm: bool,
    ) -> int:
        """Make the embedding and the layers; return the vocabulary's size."""
        if vocab_size is None:
            raise ConfigError("model.cfg.vocab_size is not set and there is no tokenizer to take it from")
        output = Normal(init.std / math.sqrt(2 * hidden_layers)) if use_scaled_init_for_output_weights else init
        self.vocab_size, self.max_seq_length, self.hidden_layers = vocab_size, max_seq_length, hidden_layers
        epsilon = layernorm_epsilon if post_norm else None
        self.embedding = BertEmbedding(
            vocab_size, hidden_size, max_seq_length, num_tokentypes, embedding_dropout_prob, epsilon, init
        )
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
                post_norm=post_norm,
                init=init,
                output_init=output,
            )
            for index in range(hidden_layers)
        )
        return vocab_size

    def units(self) -> dict[str, nn.Module]:
        """Return embedding, layers and head by name."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"embedding": self.embedding, **layers, "head": self.head}


@register_model("bert")
class Bert(_BertChain):
    """BERT for pre-training: masked words, and with `sentence_objective` a judgement of the sentence pair (order, or next sentence).

    A batch's `extra["sentence_labels"]` (B,) holds the pair's label, 0 or 1, and -100 where none is scored.

    Args:
        vocab_size: words; None = the tokenizer's.
        hidden_layers: number of layers.
        hidden_size: width.
        ffn_hidden_size: inner width of the feed-forward part; None = 4 × hidden_size.
        num_attention_heads: heads.
        max_seq_length: longest sample in tokens.
        num_tokentypes: segments that a token may belong to; 0 = no segment embedding.
        embedding_dropout_prob: dropout after the embedding.
        attention_dropout_prob: dropout on attention probabilities.
        output_dropout_prob: dropout on each branch before it is added.
        layernorm_epsilon: added to the variance in the norms.
        initializer_range: standard deviation of the initial weights.
        use_scaled_init_for_output_weights: divide that of the output projections by √(2 · hidden_layers).
        activation: of the feed-forward part and of the head.
        apply_residual_post_layernorm: norms after each sum, as BERT was published; False = before each branch and at the end.
        sentence_objective: whether there are a pooler and a sentence head.
    """

    @configurable
    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_layers: int = 12,
        hidden_size: int = 768,
        ffn_hidden_size: int | None = None,
        num_attention_heads: int = 12,
        max_seq_length: int = 512,
        num_tokentypes: int = 2,
        embedding_dropout_prob: float = 0.1,
        attention_dropout_prob: float = 0.1,
        output_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-12,
        initializer_range: float = 0.02,
        use_scaled_init_for_output_weights: bool = True,
        activation: str = "gelu",
        apply_residual_post_layernorm: bool = True,
        sentence_objective: bool = True,
    ) -> None:
        super().__init__()
        init = Normal(initializer_range)
        words = self._build_encoder(
            vocab_size, hidden_layers, hidden_size, ffn_hidden_size, num_attention_heads, max_seq_length, num_tokentypes,
            embedding_dropout_prob, attention_dropout_prob, output_dropout_prob, layernorm_epsilon, init,
            use_scaled_init_for_output_weights, activation, apply_residual_post_layernorm,
        )  # fmt: skip
        self.head = BertHead(
            self.embedding.word, words, hidden_size, layernorm_epsilon, activation, not apply_residual_post_layernorm,
            sentence_objective, init,
        )  # fmt: skip
        self.objectives = {"lm_loss": "tokens"}
        if sentence_objective:
            self.objectives["sentence_loss"] = "sentences"
        self.finish()

    def counts(self, batch: Batch) -> dict[str, int]:
        """See ChainModel."""
        found = super().counts(batch)
        if "sentence_loss" in self.objectives:
            found["sentences"] = int((_sentence_labels(batch) != IGNORE).sum())
        return found


@register_model("bert_classifier")
class BertClassifier(_BertChain):
    """BERT with a classifier, or with one label a regression, on the first token.

    A batch's `extra["sentence_labels"]` (B,) holds class numbers, or the numbers to predict; -100 where none is scored.

    Args:
        num_labels: classes; 1 = regression with the squared error.
        classifier_dropout_prob: dropout before the classifier.
        others: those of Bert.
    """

    objectives: dict[str, str] = {"loss": "sentences"}  # noqa: RUF012 - as in ChainModel

    @configurable
    def __init__(
        self,
        num_labels: int = 2,
        vocab_size: int | None = None,
        hidden_layers: int = 12,
        hidden_size: int = 768,
        ffn_hidden_size: int | None = None,
        num_attention_heads: int = 12,
        max_seq_length: int = 512,
        num_tokentypes: int = 2,
        embedding_dropout_prob: float = 0.1,
        attention_dropout_prob: float = 0.1,
        output_dropout_prob: float = 0.1,
        classifier_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-12,
        initializer_range: float = 0.02,
        use_scaled_init_for_output_weights: bool = True,
        activation: str = "gelu",
        apply_residual_post_layernorm: bool = True,
    ) -> None:
        super().__init__()
        if num_labels < 1:
            raise ConfigError(f"model.cfg.num_labels={num_labels}: at least 1")
        init = Normal(initializer_range)
        self._build_encoder(
            vocab_size, hidden_layers, hidden_size, ffn_hidden_size, num_attention_heads, max_seq_length, num_tokentypes,
            embedding_dropout_prob, attention_dropout_prob, output_dropout_prob, layernorm_epsilon, init,
            use_scaled_init_for_output_weights, activation, apply_residual_post_layernorm,
        )  # fmt: skip
        self.head = ClassifierHead(
            hidden_size, num_labels, layernorm_epsilon, classifier_dropout_prob, not apply_residual_post_layernorm, init
        )
        self.finish()

    def counts(self, batch: Batch) -> dict[str, int]:
        """See ChainModel."""
        labels = batch.extra.get("sentence_labels")
        return {"sentences": 0 if labels is None else int((labels != IGNORE).sum())}
