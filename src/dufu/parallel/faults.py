"""Seeded faults: a parity test switches one on and must turn red, so that its green means something. Only tests use this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

FAULTS = {
    "tensor.skip_leave": "the partial results of a row-split layer are not summed",
    "tensor.skip_enter": "the gradient of a column-split layer's input is not summed",
    "data.skip_reduce": "gradients are not summed over the data-parallel processes",
    "data.double": "gradients are summed over the data-parallel processes twice, or are sums where means were meant",
    "shard.scale": "a sharded gradient is halved",
    "pipeline.scale_gradients": "the gradient that a stage hands back is divided by the number of micro-batches",
    "pipeline.untied": "the gradients of a weight that two stages share are not summed",
    "sequence.skip_gradient_sum": "the gradients of undivided weights are those of this process's positions",
    "sequence.skip_scatter": "the gradient of gathered positions is not summed",
    "sequence.first_stretch": "every process takes the positions and dropout keys of the first one's stretch",
    "context.shifted_positions": "each process counts the positions of its tokens from 0",
    "context.dropout_by_rank": "the dropout of a token depends on the process that holds it",
    "context.skip_key_gradient": "the gradients of keys and values from other processes' queries are left out",
    "context.order_of_ranks": "keys and values from other processes are taken in the order of ranks, not of places",
    "expert.skip_gradient": "the gradients of rows that experts of other processes computed with do not come back",
    "expert.wrong_order": "results of experts return in the order of experts, not in that of the rows sent",
    "expert.own_usage": "the use of experts is counted over the tokens of this process, not over whole samples",
    "optim.skip_sum": "norms and means of whole parameters are those of this process's part",
}
_active: set[str] = set()


def active(name: str) -> bool:
    """Say whether a fault is switched on."""
    return name in _active


@contextmanager
def inject(name: str) -> Iterator[None]:
    """Switch a fault on inside the context."""
    if name not in FAULTS:
        raise KeyError(name)
    _active.add(name)
    try:
        yield
    finally:
        _active.discard(name)
