"""Seeded faults: a parity test switches one on and must turn red, so that its green means something. Only tests use this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

FAULTS = {
    "tensor.skip_leave": "the partial results of a row-split layer are not summed",
    "tensor.skip_enter": "the gradient of a column-split layer's input is not summed",
    "data.skip_reduce": "gradients are not summed over the data-parallel processes",
    "shard.scale": "a sharded gradient is halved",
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
