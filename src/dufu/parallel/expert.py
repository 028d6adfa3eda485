"""Expert parallelism (Lepikhin et al., "GShard", 2020): each replica of a group holds some experts; tokens travel to them and back.

The processes of an expert group see different samples. A layer sends each row, a token's hidden state for one of its experts, to the
process that holds the expert, which computes with the rows of all members and sends the results back. The weights and the sum over a
token's experts stay where the token is, so their order is that of one process.

Bytes of a layer that all_to_all is handed on one process, with R rows of its own tokens (top_k for each real one, less those beyond a
capacity), R' rows that it receives, E experts, H features of b bytes: 8 E + R H b + R' H b forward, and R' H b + R H b backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dufu.errors import LayoutError
from dufu.layers.moe import Exchange, MixtureOfExperts
from dufu.layers.router import Positions
from dufu.layers.split import SplitRule
from dufu.parallel import faults
from dufu.parallel.collectives import Communicator
from dufu.parallel.region import split_region
from dufu.parallel.tensor import Placed
from dufu.parallel.view import places_of


class _Travel(torch.autograd.Function):
    """Rows go to other processes forward; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, communicator: Communicator, sent: list[int], received: list[int]) -> Tensor:
        ctx.communicator, ctx.sent, ctx.received = communicator, sent, received
        return communicator.exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = ctx.communicator.exchange(grad, ctx.received, ctx.sent)
        if faults.active("expert.skip_gradient"):
            first = sum(ctx.sent[: ctx.communicator.rank])
            own = slice(first, first + ctx.sent[ctx.communicator.rank])
            back = torch.zeros_like(back).index_copy(0, torch.arange(own.start, own.stop, device=back.device), back[own])
        return back, None, None, None


class ExpertExchange(Exchange):
    """Rows of all members of a group, brought to the experts that this process holds; see Exchange.

    Args:
        communicator: the processes that hold different experts, the first ones on the first.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    @torch.compiler.disable  # messages are no part of a compiled graph
    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, list[int], object]:
        """See Exchange; a process with no row for some expert, or with none at all, takes part with none."""
        members = self.communicator.size
        here = counts.numel() // members
        theirs = self.communicator.exchange(counts, [here] * members, [here] * members)
        ours, numbers = torch.stack((counts, theirs)).view(2, members, here).tolist()
        sent, received = [sum(n) for n in ours], [sum(n) for n in numbers]
        arrived: Tensor = _Travel.apply(rows, self.communicator, sent, received)
        # Rows lie by member and then by expert; experts want theirs together, the members in order.
        expert = torch.arange(here, device=counts.device).repeat(members).repeat_interleave(theirs)
        order = expert.sort(stable=True).indices
        return arrived.index_select(0, order), [sum(n) for n in zip(*numbers)], (order, sent, received)

    @torch.compiler.disable
    def combine(self, rows: Tensor, sent: object) -> Tensor:
        """See Exchange."""
        order: Tensor
        to: list[int]
        back: list[int]
        order, to, back = sent  # type: ignore[misc]
        placed = rows if faults.active("expert.wrong_order") else torch.zeros_like(rows).index_copy(0, order, rows)
        home: Tensor = _Travel.apply(placed, self.communicator, back, to)
        return home


def split_experts(model: nn.Module, communicator: Communicator) -> Placed:
    """Replace the stacked weights of every mixture layer by those of this process's experts. It comes before the tensor split.

    Args:
        communicator: the processes that hold different experts.

    Returns:
        For each new parameter the whole's shape and the region that lies here.

    Raises:
        LayoutError: the experts do not divide over the processes, or there are none.
    """
    placed: Placed = {}
    size = communicator.size
    if size == 1:
        return placed
    exchange = ExpertExchange(communicator)
    for name, module in model.named_modules():
        if not getattr(module, "expert_split", False):
            continue
        module.exchange = exchange  # type: ignore[assignment]
        for leaf, whole in list(module.named_parameters(recurse=False)):
            experts = whole.shape[0]
            if experts % size:
                near = min((n for n in range(1, experts + 1) if experts % n == 0), key=lambda n: abs(n - size))
                raise LayoutError(
                    f"{name}: {experts} experts do not divide over train.dist.expert_parallel_size={size}; the nearest size that fits is "
                    f"{near}"
                )
            shape, region = split_region(tuple(whole.shape), SplitRule(0), communicator.rank, size)
            part = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device=whole.device), requires_grad=whole.requires_grad)
            placed[part] = tuple(whole.shape), region
            setattr(module, leaf, part)
    if not placed:
        raise LayoutError(
            f"train.dist.expert_parallel_size={size} divides the experts of mixture layers, but {type(model).__name__} has none; set it "
            f"to 1, or model.cfg.num_experts"
        )
    return placed


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters, as they are now, that expert-parallel processes divide."""
    experts = (m for m in model.modules() if getattr(m, "expert_split", False))
    return {parameter for module in experts for parameter in module.parameters(recurse=False)}


class ContextPositions(Positions):
    """The tokens of samples that several processes share; see Positions.

    With a capacity the choices of all tokens travel: all_gather is handed B · T · E bytes a layer, of T tokens held here.

    Args:
        communicator: the context-parallel processes.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def sum_(self, x: Tensor) -> Tensor:
        """See Positions."""
        if not faults.active("expert.own_usage"):
            self.communicator.sum_(x)
        return x

    def earlier(self, chosen: Tensor, places: Tensor | None) -> Tensor:
        """See Positions."""
        if places is None:
            return super().earlier(chosen, places)
        members = self.communicator.size
        mine = chosen.to(torch.uint8).contiguous()
        parts = torch.empty((members, *mine.shape), dtype=mine.dtype, device=mine.device)
        self.communicator.gather_into(parts.view(-1), mine.view(-1))
        total = members * mine.shape[1]
        order = torch.cat([places_of(member, members, total) for member in range(members)]).to(mine.device)
        whole = parts.transpose(0, 1).flatten(1, 2).int()
        inverse = order.argsort()
        before = super().earlier(whole.index_select(1, inverse), None)
        return before.index_select(1, places)


def share_positions(model: nn.Module, communicator: Communicator) -> None:
    """Let the mixture layers of a model know of the context-parallel processes that hold tokens of the same samples."""
    if communicator.size == 1:
        return
    positions = ContextPositions(communicator)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.positions = positions
