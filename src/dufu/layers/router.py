"""Which experts a token goes to, with what weights, and what keeps the experts evenly used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.errors import ConfigError, NotBuiltError
from dufu.layers.initial import Constant, Described, Initial, Normal

Scoring = Literal["softmax", "sigmoid"]


@dataclass
class Routing:
    """What mixture layers know of a batch's tokens, and the sums that they leave behind.

    Args:
        real: (B, T) bool, False for padding, which goes to no expert; None = all tokens are real.
        scored: (B, T) bool, the tokens whose losses the model adds up; None = no routing losses are wanted.
        places: (T,) or (B, T) numbers of the tokens within their whole samples, when this process holds some of them only.
        limited: whether layers with a capacity keep to it.
        losses: (2,) balance loss and z-loss so far, float32.
    """

    real: Tensor | None = None
    scored: Tensor | None = None
    places: Tensor | None = None
    limited: bool = True
    losses: Tensor | None = None

    def add(self, losses: Tensor) -> None:
        """Add a layer's losses."""
        self.losses = losses if self.losses is None else self.losses + losses


class Positions:
    """The seam between a mixture layer and context parallelism: by itself, a process holds every token of its samples."""

    def sum_(self, x: Tensor) -> Tensor:
        """Sum in place, without gradient, over the processes that hold tokens of the same samples."""
        return x

    def earlier(self, chosen: Tensor, places: Tensor | None) -> Tensor:
        """Return how many tokens before each token of its sample chose each expert: (B, T, E) → the same."""
        return chosen.cumsum(1) - chosen


class Router(Described):
    """Scores every expert for every token and chooses the best `top_k`; computed in float32.

    Args:
        hidden_size: width of the tokens.
        num_experts: number of experts E.
        top_k: experts of each token; of equal scores the expert of the smallest number wins.
        scoring: "softmax" over the experts, or each expert's own "sigmoid" (DeepSeek-V3, 2024).
        renormalize: divide the chosen experts' weights by their sum; None = where top_k > 1.
        scale: factor on the weights.
        bias: whether the scores have biases.
        init: how the weight begins; None = a normal of standard deviation 0.02.

    Raises:
        ConfigError: top_k or scoring is none of the possible, or renormalising would leave a single expert's weight constant.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 2,
        scoring: Scoring = "softmax",
        renormalize: bool | None = None,
        scale: float = 1.0,
        bias: bool = False,
        init: Initial | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ConfigError(f"moe_top_k={top_k}: from 1 to num_experts={num_experts}")
        if scoring not in ("softmax", "sigmoid"):
            raise ConfigError(f'moe_scoring="{scoring}"; one of "softmax", "sigmoid"')
        if renormalize and top_k == 1:
            raise ConfigError(
                "moe_renormalize=true makes the weight of a single expert 1, so that the router never learns; set it to false, or "
                "moe_top_k to 2"
            )
        self.num_experts, self.top_k, self.scoring, self.scale = num_experts, top_k, scoring, scale
        self.renormalize = top_k > 1 if renormalize is None else renormalize
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        self.initial: dict[str, Initial] = {"weight": init or Normal(0.02), "bias": Constant(0.0)}
        self.fill_alone()

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores before softmax or sigmoid: (B, T, hidden_size) → (B, T, E), float32."""
        with torch.autocast(x.device.type, enabled=False):  # a rounded score would send tokens elsewhere
            return functional.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts (…, top_k) of each token, and their weights with gradient: logits (…, E) → int64, float32."""
        scores = logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(-1)
        chosen = scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., : self.top_k]
        weights = scores.gather(-1, chosen)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all underflow
        return chosen, weights * self.scale

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return what share of each token every expert would get if all were chosen: (…, E) → the same, summing to 1."""
        if self.scoring == "softmax":
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / (scores.sum(-1, keepdim=True) + 1e-20)

    def extra_repr(self) -> str:
        """Describe the layer for print(model)."""
        return f'{self.num_experts} experts, top_k={self.top_k}, scoring="{self.scoring}"'


def check_balance(balance: str) -> None:
    """Raise an error unless the balance loss is one that any layout computes alike."""
    if balance == "global":
        raise NotBuiltError(
            'moe_balance="global" (the product of means over the global batch) needs every micro-batch\'s choices before any backward, '
            'and is not built; use moe_balance="sample"'
        )
    if balance != "sample":
        raise ConfigError(f'moe_balance="{balance}"; one of "sample", "global"')


@dataclass
class Usage:
    """How the whole samples of a batch use the experts, summed over all processes that hold their tokens; no gradient.

    Args:
        counts: (B, E) tokens that chose each expert.
        lengths: (B,) real tokens.
        scored: (B,) scored tokens.
    """

    counts: Tensor
    lengths: Tensor
    scored: Tensor


def measure_usage(chosen: Tensor, experts: int, routing: Routing, positions: Positions) -> Usage:
    """Count a batch's choices, each sample's by itself.

    Args:
        chosen: (B, T, top_k) experts of this process's tokens.
        experts: number of experts.
    """
    batch, length, _ = chosen.shape
    real = torch.ones(batch, length, device=chosen.device) if routing.real is None else routing.real.float()
    scored = real if routing.scored is None else routing.scored.float()
    packed = torch.zeros(batch, experts + 2, device=chosen.device)
    packed.scatter_add_(1, chosen.flatten(1), real.unsqueeze(-1).expand(chosen.shape).flatten(1))
    packed[:, experts], packed[:, experts + 1] = real.sum(1), scored.sum(1)
    if routing.places is not None:
        packed = positions.sum_(packed)
    return Usage(packed[:, :experts], packed[:, experts], packed[:, experts + 1])


def routing_losses(router: Router, logits: Tensor, usage: Usage, real: Tensor | None) -> Tensor:
    """Return this process's share of the balance loss and of the z-loss, each a sum: (2,) float32.

    The balance loss of a sample is E Σ_e f_e P_e, f_e being the share of its choices that fell on expert e and P_e the mean probability of
    e over its tokens (Fedus et al., "Switch transformers", 2022, within each sequence as in DeepSeek-V3); it is 1 when all are used evenly.
    The z-loss of a sample is the mean of (log Σ_e exp logit_e)² (Zoph et al., "ST-MoE", 2022). Both are means over real tokens, and are
    multiplied by the number of the sample's scored tokens: divided by the count of scored tokens in the global batch, they are means that
    depend on no split of the batch, and a sample that scores nothing adds exactly zero. f has no gradient and P is a sum over tokens, so
    processes that hold parts of a sample need only add their shares up.

    Args:
        logits: (B, T, E) of this process's tokens.
        real: (B, T) bool; None = all are real.
    """
    lengths = usage.lengths.clamp(min=1.0)
    share = usage.counts * (router.num_experts / router.top_k) / lengths.unsqueeze(-1)
    each = torch.stack(
        ((router.probabilities(logits) * share.unsqueeze(1)).sum(-1), logits.logsumexp(-1).square()), -1
    )  # (B, T, 2)
    weight = (usage.scored / lengths).view(-1, 1, 1)
    return (each * weight if real is None else each * (weight * real.unsqueeze(-1))).sum((0, 1))


def within_capacity(chosen: Tensor, router: Router, factor: float, usage: Usage, routing: Routing, positions: Positions) -> Tensor:
    """Return which choices an expert has room for, the tokens of each sample coming in the order of their positions.

    An expert takes ⌈factor · top_k · T / E⌉ tokens of a sample of T real tokens, so that no other sample decides.

    Returns:
        (B, T, top_k) bool.
    """
    taken = torch.zeros(*chosen.shape[:2], router.num_experts, dtype=torch.int32, device=chosen.device)
    taken.scatter_(2, chosen, 1)
    if routing.real is not None:
        taken = taken * routing.real.unsqueeze(-1)
    # In float64 and less a little, so that a product that is a whole number stays one.
    room = (usage.lengths.double() * (factor * router.top_k / router.num_experts) - 1e-6).ceil()
    return positions.earlier(taken, routing.places).gather(2, chosen) < room.view(-1, 1, 1)


def check_capacity(factor: float | None) -> None:
    """Raise ConfigError unless a capacity factor is None or a positive number."""
    if factor is not None and not (factor > 0 and math.isfinite(factor)):
        raise ConfigError(f"moe_capacity_factor={factor}: above 0, or null for no limit")
