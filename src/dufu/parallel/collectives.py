"""Every message between processes goes through here, counted. A group of one process sends nothing."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dufu.errors import DufuError

Work = Any


class Communicator:
    """The processes that share one dimension of the layout.

    Args:
        name: the dimension, for the counters.
        group: the process group; None for a group of one.
        ranks: global ranks of the members.
        rank: this process's place among them.
    """

    patience = timedelta(seconds=300)  # how long `meet` waits

    def __init__(self, name: str, group: Any, ranks: list[int], rank: int) -> None:
        self.name, self.group, self.ranks, self.rank = name, group, ranks, rank
        self.size = len(ranks)
        self.sent: Counter[str] = Counter()  # operation -> bytes handed to it by this process

    def _count(self, operation: str, x: Tensor) -> None:
        self.sent[operation] += x.numel() * x.element_size()

    def sum_(self, x: Tensor, async_op: bool = False) -> Work:
        """Sum in place over the group."""
        return self._reduce(x, dist.ReduceOp.SUM, async_op)

    def max_(self, x: Tensor) -> Work:
        """Take the maximum in place over the group."""
        return self._reduce(x, dist.ReduceOp.MAX, False)

    def _reduce(self, x: Tensor, operation: Any, async_op: bool) -> Work:
        if self.size == 1:
            return None
        self._count("all_reduce", x)
        return dist.all_reduce(x, operation, group=self.group, async_op=async_op)

    def gather_into(self, out: Tensor, x: Tensor, async_op: bool = False) -> Work:
        """Concatenate every member's flat `x` into the flat `out`."""
        if self.size == 1:
            out.copy_(x)
            return None
        self._count("all_gather", x)
        return dist.all_gather_single(out, x, group=self.group, async_op=async_op)

    def reduce_scatter(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return this member's part of the sum of every member's flat `x`, whose length is a multiple of the size.

        gloo's own reduce-scatter makes one all-reduce per member; an exchange and a local sum send each byte once, and sum in the
        order of ranks.

        Args:
            dtype: of the sum; half-precision `x` travels as it is, and is added up in this type.
        """
        if self.size == 1:
            return x.to(dtype)
        self._count("reduce_scatter", x)
        if x.is_cuda and x.dtype == dtype:
            out = torch.empty(x.numel() // self.size, dtype=x.dtype, device=x.device)
            dist.reduce_scatter_single(out, x, group=self.group)
            return out
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=self.group)
        return received.view(self.size, -1).sum(0, dtype=dtype)

    def broadcast_(self, x: Tensor, source: int = 0) -> None:
        """Copy member `source`'s tensor to all, in place."""
        if self.size > 1:
            self._count("broadcast", x)
            dist.broadcast(x, self.ranks[source], group=self.group)

    def objects(self, value: Any) -> list[Any]:
        """Return every member's (small, picklable) value."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.group)
        return out

    def meet(self, what: str) -> None:
        """Wait for all before something that every member must take part in; say who does not, instead of waiting for ever.

        Raises:
            DufuError: a member has not come within `patience` (gloo only; NCCL has a watchdog of its own).
        """
        if self.size == 1 or dist.get_backend(self.group) != "gloo":
            return
        try:
            dist.monitored_barrier(self.group, self.patience, wait_all_ranks=True)
        except RuntimeError as error:
            raise DufuError(
                f"{what} must be called by every process, not by some of them ({str(error).splitlines()[0]})"
            ) from error

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            dist.barrier(group=self.group)


def alone(name: str = "alone") -> Communicator:
    """Return the communicator of a single process."""
    return Communicator(name, None, [0], 0)
