"""ALBERT: BERT whose layers share their weights and whose embedding is narrower than its layers; it judges the order of sentences."""

from __future__ import annotations

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.errors import ConfigError
from dufu.models.bert.heads import BertHead
from dufu.models.bert.model import PretrainingChain


@register_model("albert")
class Albert(PretrainingChain):
    """ALBERT for pre-training: masked words, and with `sentence_objective` the order of a sentence pair.

    Args:
        vocab_size: words; None = the tokenizer's.
        hidden_layers: number of layers.
        hidden_size: width of the layers.
        ffn_hidden_size: inner width of the feed-forward part; None = 4 × hidden_size.
        num_attention_heads: heads.
        embedding_size: width of the embedding's tables and of the head.
        num_hidden_groups: sets of weights that the layers share, neighbours first.
        max_seq_length: longest sample in tokens.
        num_tokentypes: segments that a token may belong to.
        embedding_dropout_prob: dropout after the embedding.
        attention_dropout_prob: dropout on attention probabilities.
        output_dropout_prob: dropout on each branch before it is added.
        classifier_dropout_prob: dropout before the sentence head.
        layernorm_epsilon: added to the variance in the norms.
        initializer_range: standard deviation of the initial weights.
        use_scaled_init_for_output_weights: divide that of the output projections by √(2 · hidden_layers).
        activation: of the feed-forward part and of the head.
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
        embedding_size: int = 128,
        num_hidden_groups: int = 1,
        max_seq_length: int = 512,
        num_tokentypes: int = 2,
        embedding_dropout_prob: float = 0.0,
        attention_dropout_prob: float = 0.0,
        output_dropout_prob: float = 0.0,
        classifier_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-12,
        initializer_range: float = 0.02,
        use_scaled_init_for_output_weights: bool = False,
        activation: str = "gelu_tanh",
        sentence_objective: bool = True,
    ) -> None:
        super().__init__()
        if not 1 <= num_hidden_groups <= hidden_layers:
            raise ConfigError(f"model.cfg.num_hidden_groups={num_hidden_groups}: from 1 to hidden_layers={hidden_layers}")
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
            embedding_size=embedding_size,
            groups=num_hidden_groups,
        )
        self.head = BertHead(
            self.embedding.word, words, hidden_size, layernorm_epsilon, activation, False, sentence_objective, init,
            classifier_dropout_prob,
        )  # fmt: skip
        self.set_objectives()
        self.finish()
