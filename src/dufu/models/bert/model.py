"""BERT: an encoder that sees both sides, trained to fill masked words and to judge a pair of sentences."""

from __future__ import annotations

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.layers.initial import Normal
from dufu.layers.loss import IGNORE
from dufu.models.bert.encoder import EncoderChain
from dufu.models.bert.heads import BertHead, ClassifierHead, FeaturesHead, sentence_labels
from dufu.models.chain import Batch


class PretrainingChain(EncoderChain):
    """An encoder with masked words and perhaps sentence pairs as objectives; a subclass sets `head`, a BertHead."""

    dataset = "masked_lm"
    head: BertHead

    def set_objectives(self) -> None:
        """Say what is trained."""
        self.objectives = {"lm_loss": "tokens"}
        if self.head.sentence is not None:
            self.objectives["sentence_loss"] = "sentences"

    def counts(self, batch: Batch) -> dict[str, int]:
        """See ChainModel."""
        found = super().counts(batch)
        if "sentence_loss" in self.objectives:
            found["sentences"] = int((sentence_labels(batch) != IGNORE).sum())
        return found


class ClassifierChain(EncoderChain):
    """An encoder with a classifier on the first token; a subclass sets `head`, a ClassifierHead."""

    objectives: dict[str, str] = {"loss": "sentences"}  # noqa: RUF012 - as in ChainModel

    def counts(self, batch: Batch) -> dict[str, int]:
        """See ChainModel."""
        labels = batch.extra.get("sentence_labels")
        return {"sentences": 0 if labels is None else int((labels != IGNORE).sum())}


class FeaturesChain(EncoderChain):
    """An encoder that gives its hidden states; there is nothing to train it by."""

    objectives: dict[str, str] = {}  # noqa: RUF012 - as in ChainModel


@register_model("bert")
class Bert(PretrainingChain):
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
        words, init = self.build_encoder(
            vocab_size=vocab_size,
            hidden_layers=hidden_layers,
            hidden_size=hidden_size,
            ffn_hidden_size=ffn_hidden_size,
            num_attention_heads=num_attention_heads,
            max_seq_length=max_seq_length,
            num_tokentypes=num_tokentypes,
            embedding_dropout_prob=embedding_dropout_prob,
            attention_dropout_prob=attention_dropout_prob,
            output_dropout_prob=output_dropout_prob,
            layernorm_epsilon=layernorm_epsilon,
            initializer_range=initializer_range,
            use_scaled_init_for_output_weights=use_scaled_init_for_output_weights,
            activation=activation,
            apply_residual_post_layernorm=apply_residual_post_layernorm,
        )
        self.head = BertHead(
            self.embedding.word, words, hidden_size, layernorm_epsilon, activation, not apply_residual_post_layernorm,
            sentence_objective, init,
        )  # fmt: skip
        self.set_objectives()
        self.finish()


@register_model("bert_classifier")
class BertClassifier(ClassifierChain):
    """BERT with a classifier, or with one label a regression, on the first token.

    A batch's `extra["sentence_labels"]` (B,) holds class numbers, or the numbers to predict; -100 where none is scored.

    Args:
        num_labels: classes; 1 = regression with the squared error.
        classifier_dropout_prob: dropout before the classifier.
        others: those of Bert.
    """

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
        _, init = self.build_encoder(
            vocab_size=vocab_size,
            hidden_layers=hidden_layers,
            hidden_size=hidden_size,
            ffn_hidden_size=ffn_hidden_size,
            num_attention_heads=num_attention_heads,
            max_seq_length=max_seq_length,
            num_tokentypes=num_tokentypes,
            embedding_dropout_prob=embedding_dropout_prob,
            attention_dropout_prob=attention_dropout_prob,
            output_dropout_prob=output_dropout_prob,
            layernorm_epsilon=layernorm_epsilon,
            initializer_range=initializer_range,
            use_scaled_init_for_output_weights=use_scaled_init_for_output_weights,
            activation=activation,
            apply_residual_post_layernorm=apply_residual_post_layernorm,
        )
        pre_norm = not apply_residual_post_layernorm
        self.head = self.make_head(hidden_size, num_labels, layernorm_epsilon, classifier_dropout_prob, pre_norm, init)
        self.finish()

    def make_head(
        self, hidden_size: int, num_labels: int, epsilon: float, dropout: float, pre_norm: bool, init: Normal
    ) -> ClassifierHead:
        """Return the head."""
        return ClassifierHead(hidden_size, num_labels, epsilon, dropout, pre_norm, init)


@register_model("bert_features")
class BertFeatures(FeaturesChain):
    """BERT without a head: hidden states (B, T, H) of tokens (B, T), for sentence encoders and for other models to begin from.

    Args:
        pooler: whether the published pooler belongs to it.
        others: those of Bert.
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
        pooler: bool = True,
    ) -> None:
        super().__init__()
        _, init = self.build_encoder(
            vocab_size=vocab_size,
            hidden_layers=hidden_layers,
            hidden_size=hidden_size,
            ffn_hidden_size=ffn_hidden_size,
            num_attention_heads=num_attention_heads,
            max_seq_length=max_seq_length,
            num_tokentypes=num_tokentypes,
            embedding_dropout_prob=embedding_dropout_prob,
            attention_dropout_prob=attention_dropout_prob,
            output_dropout_prob=output_dropout_prob,
            layernorm_epsilon=layernorm_epsilon,
            initializer_range=initializer_range,
            use_scaled_init_for_output_weights=use_scaled_init_for_output_weights,
            activation=activation,
            apply_residual_post_layernorm=apply_residual_post_layernorm,
        )
        self.head = FeaturesHead(hidden_size, layernorm_epsilon, pooler, not apply_residual_post_layernorm, init)
        self.finish()
