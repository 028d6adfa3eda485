"""What encoder-decoder models share: two chains of layers, one after the other, of which the second attends to what the first made.

A batch is the encoder's and holds the decoder's (`Batch.decoder`). The state is the encoder's stream, and from the decoder's embedding
on the pair (stream, memory), memory being what the encoder made; the last layer of the decoder hands on its stream alone. During
generation the decoder's caches hold its own keys, and the encoder's batch those of the memory, so that the encoder runs once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dufu.errors import ConfigError, LayoutError, NotBuiltError
from dufu.layers.attention import KeyValueCache
from dufu.layers.bias import RelativeBias
from dufu.layers.dropout import Dropout
from dufu.layers.embedding import VocabEmbedding
from dufu.layers.head import LMLogits, OutputEmbedding
from dufu.layers.mask import Mask, build_mask
from dufu.layers.position import LearnedPositionalEmbedding
from dufu.layers.transformer import TransformerLayer
from dufu.models.chain import Batch, ChainModel, Sums
from dufu.models.decoder import DecoderHead

Pair = tuple[Tensor, Tensor]


def decoder_batch(batch: Batch) -> Batch:
    """Return the decoder's part of a batch.

    Raises:
        ConfigError: there is none.
    """
    if batch.decoder is None:
        raise ConfigError(
            "an encoder-decoder model needs a batch for its decoder: samples with decoder_input_ids and decoder_labels, as those of the "
            "dataset seq2seq, or Batch(..., decoder=Batch(...))"
        )
    return batch.decoder


class Embedding(nn.Module):
    """Words, times a factor, plus positions, norm, dropout; each but the words where the model has it.

    Args:
        word: shared by both sides.
        dropout: its probability.
        position: table of positions.
        norm: of the sum.
        scale: factor on the words.
    """

    def __init__(
        self,
        word: VocabEmbedding,
        dropout: float,
        position: LearnedPositionalEmbedding | None = None,
        norm: nn.Module | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.word, self.position, self.norm, self.scale = word, position, norm, scale
        self.dropout = Dropout(dropout)

    def embed(self, batch: Batch) -> Tensor:
        """Embed the tokens of a batch: (B, T) → (B, T, H)."""
        hidden = self.word(batch.input_ids)
        if self.scale != 1.0:
            hidden = hidden * self.scale
        if self.position is not None:
            hidden = hidden + self.position(batch.positions)
        if self.norm is not None:
            hidden = self.norm(hidden)
        embedded: Tensor = self.dropout(hidden, batch.keys)
        return embedded


class EncoderEmbedding(Embedding):
    """The first unit of the chain."""

    def forward(self, state: None, batch: Batch) -> Tensor:
        """Embed the encoder's tokens; a number that nobody reads where the encoder has run already."""
        return torch.zeros(1, device=batch.input_ids.device) if batch.encoded else self.embed(batch)


class DecoderEmbedding(Embedding):
    """The first unit of the decoder."""

    of_decoder = True

    def forward(self, state: Tensor, batch: Batch) -> Pair:
        """Embed the decoder's tokens; the state so far is the memory."""
        return self.embed(decoder_batch(batch)), state


class FinalNorm(nn.Module):
    """Norm and dropout after the last layer of either side.

    Args:
        norm: the norm.
        dropout: its probability.
        of_decoder: which side.
    """

    def __init__(self, norm: nn.Module, dropout: float, of_decoder: bool) -> None:
        super().__init__()
        self.norm, self.dropout, self.of_decoder = norm, Dropout(dropout), of_decoder

    def forward(self, state: Tensor, batch: Batch) -> Tensor:
        """(B, T, H) → (B, T, H)."""
        if batch.encoded and not self.of_decoder:
            return state
        out: Tensor = self.dropout(self.norm(state), decoder_batch(batch).keys if self.of_decoder else batch.keys)
        return out


def _bias(relative: RelativeBias | None, batch: Batch, past: int = 0) -> Tensor | None:
    """Return the bias of a batch's queries; under a split of positions, of those that the mask has rows for."""
    if relative is None:
        return None
    held = batch.held
    if held is None:
        found: Tensor = relative(batch.input_ids.shape[1], batch.input_ids.shape[1] + past)
    else:
        found = relative(held.total if held.rows is None else len(held.rows), held.total, held.rows)
    return found


class EncoderUnit(nn.Module):
    """A layer of the encoder.

    Args:
        relative: a bias on its attention scores, shared by all layers of the encoder; None = none.
        arguments: those of TransformerLayer.
    """

    def __init__(self, relative: RelativeBias | None, **arguments: Any) -> None:
        super().__init__()
        self.block = TransformerLayer(**arguments)
        self.relative = relative

    def forward(self, state: Tensor, batch: Batch) -> Tensor:
        """(B, T, H) → (B, T, H)."""
        if batch.encoded:
            return state
        hidden: Tensor = self.block(state, batch.mask, batch.keys, bias=_bias(self.relative, batch))
        return hidden


class DecoderUnit(nn.Module):
    """A layer of the decoder.

    Args:
        index: number of the layer, for its caches.
        last: whether it is the last one, which hands on its stream alone.
        relative: a bias on the scores of its self-attention, shared by all layers of the decoder; None = none.
        arguments: those of TransformerLayer.
    """

    of_decoder = True

    def __init__(self, index: int, last: bool, relative: RelativeBias | None, **arguments: Any) -> None:
        super().__init__()
        self.index, self.last = index, last
        self.block = TransformerLayer(**arguments, is_decoder=True)
        self.relative = relative

    def forward(self, state: Pair, batch: Batch) -> Pair | Tensor:
        """(B, T, H) and the memory (B, S, H) → the same, or the first alone."""
        (hidden, memory), own = state, decoder_batch(batch)
        cache = own.caches[self.index] if own.caches else None
        past = 0 if cache is None or cache.keys is None else cache.keys.shape[2]
        hidden = self.block(
            hidden,
            own.mask,
            own.keys,
            cache=cache,
            memory=memory,
            memory_mask=own.memory_mask,
            memory_cache=batch.caches[self.index] if batch.caches else None,
            bias=_bias(self.relative, own, past),
        )
        return hidden if self.last else (hidden, memory)


class Scale(nn.Module):
    """Multiply by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """x · factor."""
        return x if self.factor == 1.0 else x * self.factor


class EncoderDecoderHead(DecoderHead):
    """Scores of the decoder's tokens.

    Args:
        word: whose weight the scores use.
        vocab_size: words without padding.
        scale: factor on the hidden states.
        logits: makes the scores; None = LMLogits without biases.
    """

    of_decoder = True

    def __init__(
        self, word: VocabEmbedding | OutputEmbedding, vocab_size: int, scale: float = 1.0, logits: LMLogits | None = None
    ) -> None:
        super().__init__(Scale(scale), word, vocab_size, None)
        if logits is not None:
            self.logits = logits

    def forward(self, state: Tensor, batch: Batch) -> Tensor | Sums:  # type: ignore[override]
        """Sums of losses and tokens when the decoder's batch has labels, otherwise scores (B, T or 1, V)."""
        return super().forward(state, decoder_batch(batch))


class Side(nn.Module):
    """The encoder or the decoder: its units by name.

    Args:
        embedding: its first unit.
        layers: its layers.
        norm: its last unit, where it has one.
    """

    def __init__(self, embedding: Embedding, layers: nn.ModuleList, norm: FinalNorm | None) -> None:
        super().__init__()
        self.embedding, self.layers, self.norm = embedding, layers, norm

    def units(self, prefix: str) -> dict[str, nn.Module]:
        """Return the units in order, by name."""
        layers = {f"{prefix}.layers.{i}": layer for i, layer in enumerate(self.layers)}
        norm = {} if self.norm is None else {f"{prefix}.norm": self.norm}
        return {f"{prefix}.embedding": self.embedding, **layers, **norm}


class EncoderDecoder(ChainModel):
    """Base of encoder-decoder models. A subclass sets `encoder`, `decoder`, `head`, and `longest` where positions are limited.

    Attributes:
        start_token: what the decoder begins with; None = the tokenizer's pad token, or its end token where there is none.
        longest: most tokens of either side; None = any number.
    """

    causal = False  # of the encoder; the decoder is
    is_encoder_decoder = True
    encoder: Side
    decoder: Side
    head: nn.Module
    start_token: int | None = None
    longest: int | None = None

    def units(self) -> dict[str, nn.Module]:
        """Return the encoder's units, the decoder's, and the head, by name."""
        return {**self.encoder.units("encoder"), **self.decoder.units("decoder"), "head": self.head}

    def new_caches(self) -> list[KeyValueCache]:
        """Return empty caches, one for each layer of the decoder."""
        return [KeyValueCache() for _ in self.decoder.layers]

    def prepare(self, batch: Batch) -> Batch:
        """See ChainModel; both sides get positions and masks, and the decoder one for what it sees of the memory.

        Raises:
            ConfigError: the batch has no decoder's part.
            LayoutError: more tokens than positions.
            NotBuiltError: several documents in a sample.
        """
        batch = self.view(batch)
        own = decoder_batch(batch)
        for part in (batch, own):
            if part.documents is not None:
                raise NotBuiltError("samples of several documents are not built for encoder-decoder models; leave documents out")
            if part.held is None and self.longest is not None and part.input_ids.shape[1] > self.longest:
                raise LayoutError(
                    f"{part.input_ids.shape[1]} tokens do not fit into max_seq_length={self.longest}; set it to that or cut the text"
                )
            if part.positions is None:
                part.positions = torch.arange(part.input_ids.shape[1], device=part.input_ids.device).expand_as(part.input_ids)
        if batch.mask is None and not batch.encoded:
            batch.mask = _mask(batch, False)
        if own.mask is None:
            own.mask = _mask(own, True)
        if own.memory_mask is None:
            allowed = None if batch.padding is None else batch.padding.bool()[:, None, None, :]
            own.memory_mask = Mask(allowed, held=own.held)
        return batch


def _mask(batch: Batch, causal: bool) -> Mask:
    length = batch.input_ids.shape[1]
    past = next((c.keys for c in batch.caches or () if c.keys is not None), None) if causal else None
    return build_mask(
        causal=causal,
        queries=length,
        keys=length + (0 if past is None else past.shape[2]) if batch.held is None else batch.held.total,
        padding=batch.padding,
        device=batch.input_ids.device,
        held=batch.held,
    )
