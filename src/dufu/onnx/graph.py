"""What an ONNX graph of a model is, before it is written: named tensors in and out, and the sizes it is checked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

BATCH, LENGTH, PAST = "batch_size", "sequence_length", "past_sequence_length"
TOTAL = f"{PAST} + {LENGTH}"

Axes = Mapping[int, str]  # the dimensions of a tensor that may have any size, and what they are called


@dataclass(frozen=True)
class Trial:
    """One call of a graph, for tracing or for comparison.

    Args:
        label: says which sizes and masks it has.
        tensors: the inputs, in the graph's order.
    """

    label: str
    tensors: list[Tensor] = field(repr=False)


class Graph(nn.Module):
    """A model seen as a function of plain tensors. Names of inputs and outputs are those that Optimum gives, so that its tools fit.

    Args:
        model: in evaluation mode, whole, in float32.
    """

    file = "model.onnx"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def inputs(self) -> dict[str, Axes]:
        """Return the inputs in order."""
        raise NotImplementedError

    def outputs(self) -> dict[str, Axes]:
        """Return the outputs in order."""
        raise NotImplementedError

    def traced(self) -> Trial:
        """Return the call that is traced. None of its free sizes is 0 or 1, for which tracers make graphs of their own."""
        raise NotImplementedError

    def trials(self) -> Iterator[Trial]:
        """Yield calls of many sizes and masks, to be compared."""
        raise NotImplementedError

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Compute the outputs from the inputs."""
        raise NotImplementedError


def made_up_ids(batch: int, length: int, vocabulary: int) -> Tensor:
    """Return (batch, length) token numbers that differ from row to row."""
    return (torch.arange(batch)[:, None] * 5 + torch.arange(length) * 7 + 3) % vocabulary


def made_up_cache(batch: int, heads: int, length: int, size: int) -> Tensor:
    """Return (batch, heads, length, size) numbers between -1 and 1, as keys or values."""
    return torch.arange(batch * heads * length * size, dtype=torch.float32).sin().view(batch, heads, length, size)


def made_up_masks(batch: int, length: int) -> dict[str, Tensor]:
    """Return masks (batch, length) by what they are like: full, padded on either side, with holes.

    A mask that is checked only where it is full proves nothing of the others.
    """
    full = torch.ones(batch, length, dtype=torch.int64)
    place, row = torch.arange(length)[None, :], torch.arange(batch)[:, None]
    return {
        "all tokens": full,
        "padding on the left": (place >= (row + 1) % max(length, 1)).long(),
        "padding on the right": (place < length - (row + 1) % max(length, 1)).long(),
        "holes": ((place + row) % 5 % 3 == 2).long() | (place == length - 1).long(),
    }
