"""What decoder-only language models share: the layer and the head as units of the chain, with or without mixtures of experts."""

from __future__ import annotations

from torch import Tensor, nn

from dufu.layers.embedding import VocabEmbedding
from dufu.layers.head import LMLogits, OutputEmbedding
from dufu.layers.loss import IGNORE, cross_entropy_sum, divided_argmax
from dufu.layers.moe import MixtureOfExperts
from dufu.models.chain import Batch, Sums, TransformerUnit
from dufu.models.mixture import Mixture, State, routing_of, split_state

ROTATION = "rotation"  # in a batch's extra: (2, B, 1, T, rotated features / 2), the cosines and sines of its positions


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
    """

    def __init__(self, norm: nn.Module, word: VocabEmbedding | OutputEmbedding, vocab_size: int, mixture: Mixture | None) -> None:
        super().__init__()
        self.norm = norm
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
        scores = self.logits(self.norm(hidden), self.word.weight)
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
