"""Every message between processes goes through here, counted. A group of one process sends nothing."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dufu.errors import DufuError
from dufu.parallel.watch import Watched, WatchedWork

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
        self.calls = 0  # collectives begun, which `watch` numbers

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
        with Watched(self, "all_reduce", x) as watched:
            work = dist.all_reduce(x, operation, group=self.group, async_op=async_op)
        return WatchedWork(work, watched) if async_op else work

    def gather_into(self, out: Tensor, x: Tensor, async_op: bool = False) -> Work:
        """Concatenate every member's flat `x` into the flat `out`."""
        if self.size == 1:
            out.copy_(x)
            return None
        self._count("all_gather", x)
        with Watched(self, "all_gather", x) as watched:
            work = dist.all_gather_single(out, x, group=self.group, async_op=async_op)
        return WatchedWork(work, watched) if async_op else work

    def reduce_scatter(self, x: Tensor, dtype: torch.dtype, received: Tensor | None = None) -> Tensor:
        """Return this member's part of the sum of every member's flat `x`, whose length is a multiple of the size.

        gloo's own reduce-scatter makes one all-reduce per member; an exchange and a local sum send each byte once, and sum in the
        order of ranks.

        Args:
            dtype: of the sum; half-precision `x` travels as it is, and is added up in this type.
            received: memory of `x`'s size for what arrives; None = new memory.
        """
        if self.size == 1:
            return x.to(dtype, copy=True)
        self._count("reduce_scatter", x)
        if x.is_cuda and x.dtype == dtype:
            out = torch.empty(x.numel() // self.size, dtype=x.dtype, device=x.device)
            with Watched(self, "reduce_scatter", x):
                dist.reduce_scatter_single(out, x, group=self.group)
            return out
        received = torch.empty_like(x) if received is None else received
        with Watched(self, "reduce_scatter", x):
            dist.all_to_all_single(received, x, group=self.group)
        return received.view(self.size, -1).sum(0, dtype=dtype)

    def broadcast_(self, x: Tensor, source: int = 0) -> None:
        """Copy member `source`'s tensor to all, in place."""
        if self.size > 1:
            self._count("broadcast", x)
            with Watched(self, "broadcast", x):
                dist.broadcast(x, self.ranks[source], group=self.group)

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows of `x` to each member, and return the rows received, those of the first member first.

        Args:
            x: (N, …), the rows for the first member first.
            sent: rows for each member.
            received: rows from each member.
        """
        if self.size == 1:
            return x
        self._count("all_to_all", x)
        out = x.new_empty((sum(received), *x.shape[1:]))
        with Watched(self, "all_to_all", x):
            dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out

    def send(self, x: Tensor, to: int, tag: int = 0) -> Work:
        """Send a tensor to a member; it must stay as it is until the returned work is done."""
        self._count("send", x)
        with Watched(self, "send", x, self.ranks[to]) as watched:
            return WatchedWork(dist.isend(x, self.ranks[to], group=self.group, tag=tag), watched)

    def receive(self, x: Tensor, source: int, tag: int = 0) -> Work:
        """Fill a tensor with what a member sends, once the returned work is done."""
        with Watched(self, "receive", x, self.ranks[source]) as watched:
            return WatchedWork(dist.irecv(x, self.ranks[source], group=self.group, tag=tag), watched)

    def shift(self, x: Tensor, out: Tensor, tag: int = 0) -> list[Work]:
        """Begin to send a tensor to the next member, and to fill `out` with the previous one's; both stay as they are until done.

        Args:
            tag: tells apart what is under way at the same time.
        """
        self._count("send", x)
        following, previous = self.ranks[(self.rank + 1) % self.size], self.ranks[(self.rank - 1) % self.size]
        # Together: NCCL would wait for ever where every member sends first.
        operations = [
            dist.P2POp(dist.isend, x, following, self.group, tag),
            dist.P2POp(dist.irecv, out, previous, self.group, tag),
        ]
        with Watched(self, "shift", x, previous) as watched:
            return [WatchedWork(work, watched) for work in dist.batch_isend_irecv(operations)]

    def objects(self, value: Any) -> list[Any]:
        """Return every member's (small, picklable) value."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        with Watched(self, "all_gather_object"):
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
            with Watched(self, f"meeting for {what}"):
                dist.monitored_barrier(self.group, self.patience, wait_all_ranks=True)
        except RuntimeError as error:
            raise DufuError(
                f"{what} must be called by every process, not by some of them ({str(error).splitlines()[0]})"
            ) from error

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            with Watched(self, "barrier"):
                dist.barrier(group=self.group)


def alone(name: str = "alone") -> Communicator:
    """Return the communicator of a single process."""
    return Communicator(name, None, [0], 0)
