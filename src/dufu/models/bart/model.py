"""BART: BERT's encoder and GPT's decoder with learned positions; mBART has its norms before the branches, and one at the end."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.layers.embedding import VocabEmbedding
from dufu.layers.head import LMLogits
from dufu.layers.initial import Constant, Normal
from dufu.layers.mlp import MLP
from dufu.layers.norm import LayerNorm
from dufu.layers.position import LearnedPositionalEmbedding
from dufu.layers.split import SplitRule
from dufu.models.decoder import known_vocabulary
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

POSITION_OFFSET = 2  # rows of the position tables that no position uses


class FixedBiasLogits(LMLogits):
    """LMLogits with a bias that is not trained: zeros, unless a checkpoint says otherwise.

    Args:
        vocab_size: words without padding.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        # A column, since it is a row of one in the format it comes from.
        self.bias = nn.Parameter(torch.empty(vocab_size, 1), requires_grad=False)
        self.initial = {"bias": Constant(0.0)}
        self.splits = {"bias": SplitRule(0, padded=True)}
        self.fill_alone()

    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """See LMLogits."""
        assert self.bias is not None
        return functional.linear(self.split.enter(hidden), weight, self.bias.view(-1))


@register_model("bart")
class Bart(EncoderDecoder):
    """BART for text to text.

    Args:
        vocab_size: words; None = the tokenizer's.
        extra_ids: rows after the words that stand for hidden spans, where the tokenizer has no tokens for them.
        hidden_layers: number of layers of the encoder.
        decoder_layers: of the decoder; None = as many.
        hidden_size: width.
        ffn_hidden_size: inner width of the encoder's feed-forward part; None = 4 × hidden_size.
        decoder_ffn_hidden_size: of the decoder's; None = the same.
        num_attention_heads: heads of the encoder.
        decoder_attention_heads: of the decoder; None = as many.
        max_seq_length: longest sample in tokens, of either side.
        embedding_dropout_prob: dropout after the embeddings.
        attention_dropout_prob: dropout on attention probabilities.
        activation_dropout_prob: dropout on the inner features of the feed-forward part.
        output_dropout_prob: dropout on each branch before it is added.
        layernorm_epsilon: added to the variance in the norms.
        initializer_range: standard deviation of the initial weights.
        activation: of the feed-forward part.
        apply_residual_post_layernorm: norms after each sum, as BART; False = before each branch and at the end, as mBART.
        scale_embedding: whether words are multiplied by √hidden_size.
        pad_token_id: a word whose row is zero and that a look-up never trains; None = no such word.
        decoder_start_token_id: what the decoder begins with; None = the tokenizer's pad token.
    """

    @configurable
    def __init__(
        self,
        vocab_size: int | None = None,
        extra_ids: int = 0,
        hidden_layers: int = 12,
        decoder_layers: int | None = None,
        hidden_size: int = 1024,
        ffn_hidden_size: int | None = None,
        decoder_ffn_hidden_size: int | None = None,
        num_attention_heads: int = 16,
        decoder_attention_heads: int | None = None,
        max_seq_length: int = 1024,
        embedding_dropout_prob: float = 0.1,
        attention_dropout_prob: float = 0.0,
        activation_dropout_prob: float = 0.0,
        output_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        activation: str = "gelu",
        apply_residual_post_layernorm: bool = True,
        scale_embedding: bool = False,
        pad_token_id: int | None = None,
        decoder_start_token_id: int | None = None,
    ) -> None:
        super().__init__()
        init, words = Normal(initializer_range), known_vocabulary(vocab_size) + extra_ids
        post_norm = apply_residual_post_layernorm
        inner = ffn_hidden_size or 4 * hidden_size

        def layer(heads: int, width: int) -> dict[str, object]:
            return {
                "hidden_size": hidden_size,
                "ffn_hidden_size": width,
                "num_attention_heads": heads,
                "attention_dropout_prob": attention_dropout_prob,
                "output_dropout_prob": output_dropout_prob,
                "layernorm_epsilon": layernorm_epsilon,
                "post_norm": post_norm,
                "init": init,
                "mlp": MLP(hidden_size, width, activation, init=init, dropout=activation_dropout_prob),
            }

        def embedding(kind: type[EncoderEmbedding] | type[DecoderEmbedding]) -> EncoderEmbedding | DecoderEmbedding:
            table = LearnedPositionalEmbedding(max_seq_length, hidden_size, init=init, offset=POSITION_OFFSET)
            scale = hidden_size**0.5 if scale_embedding else 1.0
            return kind(word, embedding_dropout_prob, table, LayerNorm(hidden_size, layernorm_epsilon), scale)

        def final(of_decoder: bool) -> FinalNorm | None:
            return None if post_norm else FinalNorm(LayerNorm(hidden_size, layernorm_epsilon), 0.0, of_decoder)

        count = hidden_layers if decoder_layers is None else decoder_layers
        heads, width = decoder_attention_heads or num_attention_heads, decoder_ffn_hidden_size or inner
        self.vocab_size, self.max_seq_length, self.hidden_layers = words, max_seq_length, hidden_layers
        self.longest, self.start_token = max_seq_length, decoder_start_token_id
        word = VocabEmbedding(words, hidden_size, pad_token_id, init)
        self.encoder = Side(
            embedding(EncoderEmbedding),
            nn.ModuleList(EncoderUnit(None, **layer(num_attention_heads, inner)) for _ in range(hidden_layers)),
            final(False),
        )
        self.decoder = Side(
            embedding(DecoderEmbedding),
            nn.ModuleList(DecoderUnit(i, i == count - 1, None, **layer(heads, width)) for i in range(count)),
            final(True),
        )
        self.head = EncoderDecoderHead(word, words, logits=FixedBiasLogits(words))
        self.finish()


__all__ = ["Bart", "FixedBiasLogits"]
