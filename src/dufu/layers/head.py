"""From hidden states to scores: the language-model logits and the pooler."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.layers.initial import Constant, Described, Initial, Normal
from dufu.layers.linear import Linear
from dufu.layers.mlp import build_activation
from dufu.layers.split import WHOLE, Split, SplitRule


class LMLogits(Described):
    """Scores over the vocabulary from an embedding's weight, the vocabulary divided as the weight is.

    Args:
        vocab_size: the whole vocabulary without padding.
        bias: whether each word has a bias of its own.

    Shapes: (…, H) and weight (V or a part, H) → (…, V or a part).
    """

    def __init__(self, vocab_size: int, bias: bool = False) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.split: Split = WHOLE
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self.initial: dict[str, Initial] = {"bias": Constant(0.0)}
        self.splits = {"bias": SplitRule(0, padded=True)}
        self.fill_alone()

    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return this process's part of the scores."""
        return functional.linear(self.split.enter(hidden), weight, self.bias)

    def whole(self, scores: Tensor) -> Tensor:
        """Return the scores of the whole vocabulary, without padding."""
        return self.split.gather(scores)[..., : self.vocab_size]


class OutputEmbedding(Described):
    """The head's own matrix (V, H), for models whose head is not tied to the embedding."""

    def __init__(self, vocab_size: int, hidden_size: int, init: Initial | None = None) -> None:
        super().__init__()
        self.split: Split = WHOLE
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.initial: dict[str, Initial] = {"weight": init or Normal(0.02)}
        self.splits = {"weight": SplitRule(0, padded=True)}
        self.fill_alone()


class Pooler(nn.Module):
    """activation(W · the first token): (B, T, H) → (B, H)."""

    def __init__(self, hidden_size: int, activation: str | None = "tanh", init: Initial | None = None) -> None:
        super().__init__()
        self.dense = Linear(hidden_size, hidden_size, parallel="data", init=init)
        self.activation = build_activation(activation)

    def forward(self, hidden: Tensor) -> Tensor:
        """Pool the first token."""
        return self.activation(self.dense(hidden[:, 0]))
