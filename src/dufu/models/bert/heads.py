"""What encoders in BERT's likeness end with: masked words and a judgement of the pair, a classifier, or the hidden states themselves."""

from __future__ import annotations

from torch import Tensor, nn

from dufu.errors import ConfigError
from dufu.layers.dropout import Dropout
from dufu.layers.embedding import VocabEmbedding
from dufu.layers.head import LMLogits, Pooler
from dufu.layers.initial import Normal
from dufu.layers.linear import Linear
from dufu.layers.loss import IGNORE, cross_entropy_sum, divided_argmax
from dufu.layers.mlp import build_activation
from dufu.layers.norm import LayerNorm
from dufu.models.chain import Batch, Sums


class BertHead(nn.Module):
    """Scores of the masked words against the word embedding, and of the sentence pair from the first token.

    Args:
        word: whose weight the scores use.
        hidden_size: width of the states; the scores are made in the width of the embedding.
        pre_norm: whether the states come without a last norm.
        sentence_objective: whether there are a pooler and a sentence head.
        sentence_dropout: before the sentence head.
    """

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
        sentence_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        size = word.embedding_dim
        self.norm = LayerNorm(hidden_size, epsilon) if pre_norm else None
        self.transform = Linear(hidden_size, size, init=init)
        self.activation = build_activation(activation)
        self.transform_norm = LayerNorm(size, epsilon)
        self.word = word
        self.logits = LMLogits(vocab_size, bias=True)
        self.pooler = Pooler(hidden_size, init=init) if sentence_objective else None
        self.sentence_dropout = Dropout(sentence_dropout) if sentence_dropout else None
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
            pair = sentence_labels(batch)
            pooled = self.pooler(state)
            if self.sentence_dropout is not None:
                pooled = self.sentence_dropout(pooled, first_keys(batch))
            judged = self.sentence(pooled)
            sums["sentence_loss"] = cross_entropy_sum(judged, pair)
            sums["sentences"] = (pair != IGNORE).sum()
            sums["sentences_correct"] = ((judged.detach().argmax(-1) == pair) & (pair != IGNORE)).sum()
        return sums


class ClassifierHead(nn.Module):
    """Scores of classes, or one number, from the first token.

    Args:
        dropout: before the classifier.
        pre_norm: whether the states come without a last norm.
        dropout_first: whether there is dropout before the pooler too, as in RoBERTa.
    """

    def __init__(
        self,
        hidden_size: int,
        num_labels: int,
        epsilon: float,
        dropout: float,
        pre_norm: bool,
        init: Normal,
        dropout_first: bool = False,
    ) -> None:
        super().__init__()
        if num_labels < 1:
            raise ConfigError(f"model.cfg.num_labels={num_labels}: at least 1")
        self.num_labels = num_labels
        self.norm = LayerNorm(hidden_size, epsilon) if pre_norm else None
        self.first_dropout = Dropout(dropout) if dropout_first else None
        self.pooler = Pooler(hidden_size, init=init)
        self.dropout = Dropout(dropout)
        self.classes = Linear(hidden_size, num_labels, init=init)

    def forward(self, state: Tensor, batch: Batch) -> Tensor | Sums:
        """Sums when the batch has sentence labels, otherwise the scores (B, num_labels)."""
        if self.norm is not None:
            state = self.norm(state)
        keys = first_keys(batch)
        first = state[:, :1]
        if self.first_dropout is not None:
            first = self.first_dropout(first[:, 0], keys).unsqueeze(1)
        scores: Tensor = self.classes(self.dropout(self.pooler(first), keys))
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


class FeaturesHead(nn.Module):
    """The hidden states as they are; the pooler's weights are kept for whoever uses them.

    Args:
        pooler: whether there is one.
        pre_norm: whether the states come without a last norm.
    """

    def __init__(self, hidden_size: int, epsilon: float, pooler: bool, pre_norm: bool, init: Normal) -> None:
        super().__init__()
        self.norm = LayerNorm(hidden_size, epsilon) if pre_norm else None
        self.pooler = Pooler(hidden_size, init=init) if pooler else None

    def forward(self, state: Tensor, batch: Batch) -> Tensor:
        """(B, T, H) → (B, T, H)."""
        return state if self.norm is None else self.norm(state)

    def pooled(self, state: Tensor) -> Tensor:
        """Return what the pooler makes of hidden states: (B, T, H) → (B, H).

        Raises:
            ConfigError: there is none.
        """
        if self.pooler is None:
            raise ConfigError("model.cfg.pooler=false: this model has no pooler")
        out: Tensor = self.pooler(state)
        return out


def first_keys(batch: Batch) -> Tensor | None:
    """Return the dropout keys of the samples' first tokens."""
    return None if batch.keys is None else batch.keys[:, 0]


def sentence_labels(batch: Batch) -> Tensor:
    """Return the labels of the sentence pairs.

    Raises:
        ConfigError: the samples have none.
    """
    if "sentence_labels" not in batch.extra:
        raise ConfigError(
            "model.cfg.sentence_objective=true, but the samples have no sentence_labels; set it to false, or let the dataset make them"
        )
    return batch.extra["sentence_labels"]
