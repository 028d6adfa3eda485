"""T5: an encoder and a decoder with relative positions, root-mean-square norms before each branch, no biases, unscaled attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.errors import ConfigError
from dufu.layers.bias import RelativeBias
from dufu.layers.embedding import VocabEmbedding
from dufu.layers.head import OutputEmbedding
from dufu.layers.initial import Normal
from dufu.layers.mlp import MLP, GatedMLP
from dufu.layers.norm import RMSNorm
from dufu.models.encdec import (
    DecoderEmbedding,
    DecoderUnit,
    EncoderDecoder,
    EncoderDecoderHead,
    EncoderEmbedding,
    EncoderUnit,
    FinalNorm,
    Side,
)


@dataclass(frozen=True)
class NormalRows:
    """Gaussian rows, the first of one standard deviation and the others of another: queries, and keys and values.

    Args:
        std: of the first rows.
        rows: how many they are.
        other: of the others.
    """

    std: float
    rows: int
    other: float

    def fill(self, out: Tensor, seed: int, name: str, row: int, col: int) -> None:
        """See Initial."""
        cut = min(max(self.rows - row, 0), out.shape[0])
        Normal(self.std).fill(out[:cut], seed, name, row, col)
        Normal(self.other).fill(out[cut:], seed, name, row + cut, col)

    def draw(self, out: Tensor) -> None:
        """See Initial."""
        out[: self.rows].normal_(0.0, self.std)
        out[self.rows :].normal_(0.0, self.other)


@register_model("t5")
class T5(EncoderDecoder):
    """T5 for text to text, as first published, or with `gated_mlp` and an own head as in v1.1.

    Weights begin as in the published training (Raffel et al., 2020): attention has no scale, so that of the queries is in their
    standard deviation.

    Args:
        vocab_size: words; None = the tokenizer's.
        extra_ids: rows after the words that stand for hidden spans, where the tokenizer has no tokens for them.
        hidden_layers: number of layers of the encoder.
        decoder_layers: of the decoder; None = as many.
        hidden_size: width.
        ffn_hidden_size: inner width of the feed-forward part; None = 4 × hidden_size.
        num_attention_heads: heads.
        head_size: features of a head; None = hidden_size / num_attention_heads.
        max_seq_length: longest sample that a dataset makes; positions are relative, so the model itself sets no limit.
        relative_attention_num_buckets, relative_attention_max_distance: of the position bias; see RelativeBias.
        embedding_dropout_prob: dropout after the embeddings.
        attention_dropout_prob: dropout on attention probabilities.
        activation_dropout_prob: dropout on the inner features of the feed-forward part.
        output_dropout_prob: dropout on each branch before it is added, and after the final norms.
        layernorm_epsilon: added to the mean square in the norms.
        initializer_factor: factor on the standard deviations of all initial weights.
        activation: of the feed-forward part, or of its gate.
        gated_mlp: whether the feed-forward part is gated.
        tie_word_embeddings: whether the head uses the word embedding.
        scale_decoder_outputs: whether the head's input is divided by √hidden_size; None = where it is tied.
        decoder_start_token_id: what the decoder begins with; None = the tokenizer's pad token.
    """

    @configurable
    def __init__(
        self,
        vocab_size: int | None = None,
        extra_ids: int = 0,
        hidden_layers: int = 6,
        decoder_layers: int | None = None,
        hidden_size: int = 512,
        ffn_hidden_size: int | None = None,
        num_attention_heads: int = 8,
        head_size: int | None = None,
        max_seq_length: int = 512,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        embedding_dropout_prob: float = 0.1,
        attention_dropout_prob: float = 0.1,
        activation_dropout_prob: float = 0.1,
        output_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-6,
        initializer_factor: float = 1.0,
        activation: str = "relu",
        gated_mlp: bool = False,
        tie_word_embeddings: bool = True,
        scale_decoder_outputs: bool | None = None,
        decoder_start_token_id: int | None = None,
    ) -> None:
        super().__init__()
        if vocab_size is None:
            raise ConfigError("model.cfg.vocab_size is not set and there is no tokenizer to take it from")
        if extra_ids < 0:
            raise ConfigError(f"model.cfg.extra_ids={extra_ids}: 0 or more")
        words, inner = vocab_size + extra_ids, ffn_hidden_size or 4 * hidden_size
        features = head_size or hidden_size // num_attention_heads
        width, factor = num_attention_heads * features, initializer_factor
        into = factor * hidden_size**-0.5

        def feed_forward() -> nn.Module:
            kind = GatedMLP if gated_mlp else MLP
            out = Normal(factor * inner**-0.5)
            return kind(hidden_size, inner, activation, False, Normal(into), out, activation_dropout_prob)

        def layer() -> dict[str, object]:
            return {
                "hidden_size": hidden_size,
                "ffn_hidden_size": inner,
                "num_attention_heads": num_attention_heads,
                "head_size": head_size,
                "attention_dropout_prob": attention_dropout_prob,
                "output_dropout_prob": output_dropout_prob,
                "layernorm_epsilon": layernorm_epsilon,
                "init": NormalRows(into * features**-0.5, width, into),
                "output_init": Normal(factor * width**-0.5),
                "bias": False,
                "norm": RMSNorm,
                "mlp": feed_forward(),
                "scale": 1.0,
            }

        def relative(bidirectional: bool) -> RelativeBias:
            buckets, furthest = relative_attention_num_buckets, relative_attention_max_distance
            return RelativeBias(num_attention_heads, buckets, furthest, bidirectional, Normal(into))

        def final(of_decoder: bool) -> FinalNorm:
            return FinalNorm(RMSNorm(hidden_size, layernorm_epsilon), output_dropout_prob, of_decoder)

        count = hidden_layers if decoder_layers is None else decoder_layers
        self.vocab_size, self.max_seq_length, self.hidden_layers = words, max_seq_length, hidden_layers
        self.start_token = decoder_start_token_id
        word, both, back = VocabEmbedding(words, hidden_size, init=Normal(factor)), relative(True), relative(False)
        self.encoder = Side(
            EncoderEmbedding(word, embedding_dropout_prob),
            nn.ModuleList(EncoderUnit(both, **layer()) for _ in range(hidden_layers)),
            final(False),
        )
        self.decoder = Side(
            DecoderEmbedding(word, embedding_dropout_prob),
            nn.ModuleList(DecoderUnit(i, i == count - 1, back, **layer()) for i in range(count)),
            final(True),
        )
        tied = tie_word_embeddings
        scaled = tied if scale_decoder_outputs is None else scale_decoder_outputs
        # A head of its own sees normed states of size 1 a feature.
        head = word if tied else OutputEmbedding(words, hidden_size, Normal(factor if scaled else into))
        self.head = EncoderDecoderHead(head, words, hidden_size**-0.5 if scaled else 1.0)
        self.finish()


@register_model("mt5")
class MT5(T5):
    """mT5: T5 v1.1 with a vocabulary of many languages (Xue et al., 2021); the head's input is never scaled.

    Args:
        others: those of T5.
    """

    @configurable
    def __init__(
        self,
        vocab_size: int | None = None,
        extra_ids: int = 0,
        hidden_layers: int = 8,
        decoder_layers: int | None = None,
        hidden_size: int = 512,
        ffn_hidden_size: int | None = 1024,
        num_attention_heads: int = 6,
        head_size: int | None = 64,
        max_seq_length: int = 1024,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        embedding_dropout_prob: float = 0.1,
        attention_dropout_prob: float = 0.1,
        activation_dropout_prob: float = 0.1,
        output_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-6,
        initializer_factor: float = 1.0,
        activation: str = "gelu_tanh",
        gated_mlp: bool = True,
        tie_word_embeddings: bool = False,
        decoder_start_token_id: int | None = None,
    ) -> None:
        super().__init__(
            vocab_size, extra_ids, hidden_layers, decoder_layers, hidden_size, ffn_hidden_size, num_attention_heads, head_size,
            max_seq_length, relative_attention_num_buckets, relative_attention_max_distance, embedding_dropout_prob,
            attention_dropout_prob, activation_dropout_prob, output_dropout_prob, layernorm_epsilon, initializer_factor, activation,
            gated_mlp, tie_word_embeddings, False, decoder_start_token_id,
        )  # fmt: skip


__all__ = ["MT5", "T5", "NormalRows"]
