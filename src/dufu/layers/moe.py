"""A mixture of experts: feed-forward parts of which each token uses a few."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dufu.layers.initial import Described, Initial, Normal
from dufu.layers.linear import Linear
from dufu.layers.mlp import MLP, GatedMLP, build_activation
from dufu.layers.router import (
    Positions,
    Router,
    Routing,
    Scoring,
    check_balance,
    check_capacity,
    measure_usage,
    routing_losses,
    within_capacity,
)
from dufu.layers.split import WHOLE, Split, SplitRule


class Exchange:
    """The seam between a mixture layer and expert parallelism: by itself, a process holds every expert.

    An exchange's `dispatch` brings rows to the processes that hold their experts, and its `combine` brings the results back.
    """

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, list[int], object]:
        """Send rows to their experts.

        Args:
            rows: (R, H), those of expert 0 first.
            counts: (experts of the whole layer,) rows of each expert.

        Returns:
            The rows of this process's experts, those of its first one first; the number of rows of each; what `combine` needs.
        """
        return rows, counts.tolist(), None

    def combine(self, rows: Tensor, sent: object) -> Tensor:
        """Return the results to where their rows came from, in the rows' order."""
        return rows


class Experts(Described):
    """E feed-forward parts without biases, plain W₂ act(W₁ x) or gated W₂ (act(W_g x) · W_u x), in stacked weights.

    The stack's first dimension is divided over expert-parallel processes, the inner features over tensor-parallel ones.

    Args:
        num_experts: number of experts E.
        hidden_size, ffn_hidden_size: outer and inner width F.
        activation: a name in `mlp.ACTIVATIONS`.
        gated: which of the two.
        init, output_init: how the input and the output weights begin; None = a normal with Glorot's standard deviation.

    Shapes: rows (R, hidden_size) and counts (E,) → (R, hidden_size); weights (E, F or 2 F, hidden_size) and (E, F, hidden_size).
    """

    expert_split = True

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        activation: str | None = "silu",
        gated: bool = True,
        init: Initial | None = None,
        output_init: Initial | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.gated = num_experts, gated
        self.activation = build_activation(activation)
        self.split: Split = WHOLE
        self.exchange = Exchange()
        rule: Initial = init or Normal((2.0 / (hidden_size + ffn_hidden_size)) ** 0.5)
        inner = 2 * ffn_hidden_size if gated else ffn_hidden_size
        self.expand = nn.Parameter(torch.empty(num_experts, inner, hidden_size))
        self.contract = nn.Parameter(torch.empty(num_experts, ffn_hidden_size, hidden_size))
        self.initial: dict[str, Initial] = {"expand": rule, "contract": output_init or rule}
        sections = (ffn_hidden_size, ffn_hidden_size) if gated else None
        self.splits = {"expand": SplitRule(1, sections), "contract": SplitRule(1)}
        self.fill_alone()

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Give each expert its rows: the first counts[0] rows are those of expert 0, and so on."""
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))  # what travels is what is computed with
        here, numbers, sent = self.exchange.dispatch(rows, counts)
        # An expert without rows computes with none, so that every process makes the same graph.
        parts = zip(here.split(numbers), self.expand.unbind(0), self.contract.unbind(0))
        results = [self._one(part, expand, contract) for part, expand, contract in parts]
        return self.exchange.combine(torch.cat(results), sent)

    def _one(self, x: Tensor, expand: Tensor, contract: Tensor) -> Tensor:
        inner = x @ expand.t()
        if not self.gated:
            return self.activation(inner) @ contract
        gate, up = inner.chunk(2, -1)
        return (self.activation(gate) * up) @ contract

    def extra_repr(self) -> str:
        """Describe the layer for print(model)."""
        return f"{self.num_experts} experts, gated={self.gated}"


class MixtureOfExperts(nn.Module):
    """Σ over a token's chosen experts of weight · expert(x) (Shazeer et al., 2017), plus experts that all tokens share.

    Without a capacity no choice is dropped. With one, an expert takes ⌈capacity_factor · top_k · T / E⌉ tokens of each sample of T
    tokens, in the order of their positions, and the choices beyond add nothing: such a token passes through the layer's residual only.
    Deciding within each sample keeps the result independent of how batches are cut.

    Args:
        hidden_size, ffn_hidden_size: outer width, and inner width of one expert.
        num_experts: number of experts E.
        top_k: experts of each token.
        activation: a name in `mlp.ACTIVATIONS`.
        gated: whether experts are gated.
        shared_experts: how many experts' width all tokens share beside the chosen ones (Dai et al., "DeepSeekMoE", 2024).
        shared_gate: whether what they add is multiplied by a sigmoid of the token (Qwen2-MoE; Yang et al., 2024).
        scoring, renormalize, scale, router_bias: see Router.
        capacity_factor: None = no limit.
        balance: what the balance loss compares: each "sample" by itself, or the "global" batch (not built).
        balance_weight, z_weight: factors of the two routing losses; see `router.routing_losses`.
        init, output_init: how the input projections (also the router's) and the output projections begin.

    Shapes: (B, T, hidden_size) → the same.

    Raises:
        ConfigError: a setting that is none of the possible. NotBuiltError: balance="global".
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        top_k: int = 2,
        activation: str | None = "silu",
        gated: bool = True,
        shared_experts: int = 0,
        scoring: Scoring = "softmax",
        renormalize: bool | None = None,
        scale: float = 1.0,
        router_bias: bool = False,
        capacity_factor: float | None = None,
        balance: str = "sample",
        balance_weight: float = 0.0,
        z_weight: float = 0.0,
        init: Initial | None = None,
        output_init: Initial | None = None,
        shared_gate: bool = False,
    ) -> None:
        super().__init__()
        check_balance(balance)
        check_capacity(capacity_factor)
        self.capacity_factor, self.loss_weights = capacity_factor, (balance_weight, z_weight)
        self.split: Split = WHOLE
        self.positions = Positions()
        self.router = Router(hidden_size, num_experts, top_k, scoring, renormalize, scale, router_bias, init)
        self.experts = Experts(num_experts, hidden_size, ffn_hidden_size, activation, gated, init, output_init)
        kind = GatedMLP if gated else MLP
        width = shared_experts * ffn_hidden_size
        self.shared = kind(hidden_size, width, activation, False, init, output_init) if shared_experts else None
        self.shared_gate = Linear(hidden_size, 1, bias=False, init=init) if shared_experts and shared_gate else None

    @property
    def cost(self) -> int:
        """Return the multiplications of one token in the router and in the experts that it goes to; `shared` counts by itself."""
        experts = self.experts
        per_expert = (experts.expand.numel() + experts.contract.numel()) // experts.num_experts
        return self.router.weight.numel() + self.router.top_k * per_expert

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """Apply the layer; with `routing` padding goes to no expert, and the routing losses are added there."""
        routing = routing or Routing()
        out: Tensor = self._mix(x, self.router(x), routing)
        if self.shared is not None:
            shared: Tensor = self.shared(x)
            out = out + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())
        return out

    # Numbers of rows are data: a compiler would make code for each.
    @torch.compiler.disable
    def _mix(self, x: Tensor, logits: Tensor, routing: Routing) -> Tensor:
        # Tensor-parallel processes hold parts of each expert: the gradients of what meets them, tokens and weights, are summed. The
        # losses are computed alike by all, and theirs are not.
        with torch.autocast(x.device.type, enabled=False):  # what travels is not rounded, as the router's scores are not
            chosen, weights = self.router.choose(self.split.enter(logits))
        kept = self._kept(chosen, self.split.whole(logits), routing)
        x = self.split.enter(x)
        out = self._spread(x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1), kept)
        return self.split.leave(out.view(x.shape))

    def _kept(self, chosen: Tensor, logits: Tensor, routing: Routing) -> Tensor | None:
        """Return (B·T, top_k) bool, which choices count, None for all; add the losses."""
        real = routing.real
        kept = None if real is None else real.unsqueeze(-1).expand(chosen.shape)
        limit = self.capacity_factor if routing.limited else None
        losses = routing.scored is not None and any(self.loss_weights)
        if limit is not None or losses:
            usage = measure_usage(chosen, self.router.num_experts, routing, self.positions)
            if losses:
                routing.add(routing_losses(self.router, logits, usage, real) * logits.new_tensor(self.loss_weights))
            if limit is not None:
                fits = within_capacity(chosen, self.router, limit, usage, routing, self.positions)
                kept = fits if kept is None else kept & fits
        return None if kept is None else kept.flatten(0, 1)

    def _spread(self, x: Tensor, chosen: Tensor, weights: Tensor, kept: Tensor | None) -> Tensor:
        """Send each token's row to its experts and add up the weighted results: (N, H) and three (N, top_k) → (N, H)."""
        experts, top_k = self.router.num_experts, self.router.top_k
        # A choice that does not count is sorted behind all experts, and left out.
        wanted = chosen if kept is None else chosen.masked_fill(~kept, experts)
        order = wanted.flatten().sort(stable=True).indices
        counts = torch.bincount(wanted.flatten(), minlength=experts + 1)[:experts]
        if kept is not None:
            order = order[: int(counts.sum())]
        # Every choice has a row of its own in both directions, so that sums over a token's choices have one fixed order.
        rows = x.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, x.shape[-1]).index_select(0, order)
        found: Tensor = self.experts(rows, counts)
        width = found.shape[-1]
        placed = found.new_zeros(chosen.numel(), width).index_copy(0, order, found).view(*chosen.shape, width)
        return (placed * weights.to(placed.dtype).unsqueeze(-1)).sum(1)
