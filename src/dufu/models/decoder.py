"""What decoder-only language models share: embedding, layers and head as units of the chain, with or without mixtures of experts, and
what the layers read of a batch beside its mask: a rotation of positions, a bias of distances, windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dufu.errors import ConfigError, LayoutError
from dufu.layers.bias import AlibiBias
from dufu.layers.dropout import Dropout
from dufu.layers.embedding import VocabEmbedding
from dufu.layers.head import LMLogits, OutputEmbedding
from dufu.layers.initial import Initial
from dufu.layers.loss import IGNORE, cross_entropy_sum, divided_argmax
from dufu.layers.moe import MixtureOfExperts
from dufu.layers.rotary import RotaryEmbedding
from dufu.models.chain import Batch, ChainModel, Sums, TransformerUnit
from dufu.models.mixture import Mixture, State, routing_of, split_state

# In a batch's extra:
ROTATION = "rotation"  # (2, B, 1, T, rotated features / 2), the cosines and sines of its positions
DISTANCES = "distance_bias"  # (1, heads of this process, T, S), to be added to the scores


class WordEmbedding(nn.Module):
    """Words, scaled, then dropout: ids (B, T) → (B, T, H).

    Args:
        vocab_size, hidden_size: sizes.
        dropout: its probability.
        init: how the rows begin.
        scale: factor on the rows, as Gemma has √hidden_size.
    """

    def __init__(self, vocab_size: int, hidden_size: int, dropout: float, init: Initial, scale: float = 1.0) -> None:
        super().__init__()
        self.word = VocabEmbedding(vocab_size, hidden_size, init=init)
        self.dropout = Dropout(dropout)
        self.scale = scale

    def forward(self, state: None, batch: Batch) -> Tensor:
        """Embed the batch's tokens."""
        words: Tensor = self.word(batch.input_ids)
        if self.scale != 1.0:
            # Rounded to the words' type, as the published weights were trained with.
            words = words * float(torch.tensor(self.scale, dtype=words.dtype, device="cpu"))
        hidden: Tensor = self.dropout(words, batch.keys)
        return hidden


class DecoderUnit(TransformerUnit):
    """A transformer layer as a unit of the chain: rotated where the batch has a rotation, dense or a mixture of experts."""

    def forward(self, state: State, batch: Batch) -> State:  # type: ignore[override]
        """(B, T, H), or with the routing losses so far → the same."""
        assert batch.mask is not None
        hidden, losses = split_state(state)
        routing = routing_of(batch, losses) if isinstance(self.block.mlp, MixtureOfExperts) else None
        rotation = batch.extra.get(ROTATION)
        hidden = self.block(
            hidden,
            batch.mask,
            batch.keys,
            cache=batch.caches[self.index] if batch.caches else None,
            bias=batch.extra.get(DISTANCES),
            rotation=None if rotation is None else (rotation[0], rotation[1]),
            routing=routing,
        )
        losses = losses if routing is None else routing.losses
        return hidden if losses is None else (hidden, losses)


class DecoderHead(nn.Module):
    """Final norm, then scores against the word embedding (tied) or a matrix of its own.

    Args:
        norm: the final norm.
        word: whose weight the scores use.
        vocab_size: words without padding.
        mixture: of the model's layers; its routing losses are objectives.
        project: from the hidden states to the width of `word`; None = they have that width.
    """

    def __init__(
        self,
        norm: nn.Module,
        word: VocabEmbedding | OutputEmbedding,
        vocab_size: int,
        mixture: Mixture | None = None,
        project: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.norm, self.project = norm, project
        self.word = word
        self.logits = LMLogits(vocab_size)
        self.routing_losses = mixture.losses if mixture else {}

    @property
    def objectives(self) -> dict[str, str]:
        """Return each summed loss and the count that divides it; beside routing losses the language model's is `lm_loss`."""
        names = ["lm_loss", *self.routing_losses] if self.routing_losses else ["loss"]
        return dict.fromkeys(names, "tokens")

    def forward(self, state: State, batch: Batch) -> Tensor | Sums:
        """Sums of losses and tokens when there are labels, otherwise scores over the whole vocabulary."""
        hidden, losses = split_state(state)
        if batch.last_only:
            hidden = hidden[:, -1:]
        hidden = self.norm(hidden)
        if self.project is not None:
            hidden = self.project(hidden)
        scores = self.logits(hidden, self.word.weight)
        if batch.labels is None:
            return self.logits.whole(scores)
        flat, labels = scores.flatten(0, 1), batch.labels.flatten()
        vocab, split = self.logits.vocab_size, self.logits.split
        scored = labels != IGNORE
        loss = cross_entropy_sum(flat, labels, split=split, vocab_size=vocab)
        sums: Sums = {next(iter(self.objectives)): loss, "tokens": scored.sum()}
        for name, place in self.routing_losses.items():
            assert losses is not None
            sums[name] = losses[place]
        if not self.training:
            sums["correct"] = ((divided_argmax(flat.detach(), split, vocab) == labels) & scored).sum()
        return sums


def known_vocabulary(vocab_size: int | None) -> int:
    """Return the vocabulary's size.

    Raises:
        ConfigError: there is none.
    """
    if vocab_size is None:
        raise ConfigError("model.cfg.vocab_size is not set and there is no tokenizer to take it from")
    return vocab_size


class Decoder(ChainModel):
    """Base of decoder-only language models. A subclass's `__init__` ends with `compose`."""

    def compose(
        self,
        embedding: nn.Module,
        layers: Sequence[DecoderUnit],
        head: DecoderHead,
        max_seq_length: int,
        rotary: RotaryEmbedding | None = None,
        alibi: AlibiBias | None = None,
    ) -> None:
        """Set the parts.

        Args:
            embedding, layers, head: the units.
            max_seq_length: longest sample in tokens.
            rotary: rotates queries and keys of all layers.
            alibi: adds its bias to the scores of all layers.
        """
        self.vocab_size, self.max_seq_length = head.logits.vocab_size, max_seq_length
        self.rotary, self.alibi = rotary, alibi
        self.embedding, self.layers, self.head = embedding, nn.ModuleList(layers), head
        self.hidden_layers, self.objectives = len(self.layers), head.objectives
        self.windows = {unit.block.attention.window for unit in layers if unit.block.attention.window is not None}
        self.finish()

    def units(self) -> dict[str, nn.Module]:
        """Return embedding, layers and head by name."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"embedding": self.embedding, **layers, "head": self.head}

    def prepare(self, batch: Batch) -> Batch:
        """See ChainModel; what all layers share of positions, distances and windows is computed once.

        Raises:
            LayoutError: more tokens than max_seq_length.
        """
        length = batch.input_ids.shape[1]
        if batch.held is None and length > self.max_seq_length:
            raise LayoutError(
                f"{length} tokens do not fit into max_seq_length={self.max_seq_length}; set it to {length} or cut the text"
            )
        batch = super().prepare(batch)
        assert batch.positions is not None and batch.mask is not None
        queries, places, device = batch.input_ids.shape[1], None, batch.input_ids.device
        past = next((c.keys for c in batch.caches or () if c.keys is not None), None)
        keys = queries + (0 if past is None else past.shape[2])
        if batch.held is not None:
            queries, keys, places = batch.held.total, batch.held.total, batch.held.rows
        batch.mask.prepare_windows(self.windows, queries, keys, device)
        if self.rotary is not None:
            batch.extra = {**batch.extra, ROTATION: torch.stack(self.rotary(batch.positions))}
        if self.alibi is not None:
            batch.extra = {**batch.extra, DISTANCES: self.alibi(queries, keys, device, places)}
        return batch
