"""What a parameter holds before training: a rule that can fill any rectangle of it, on any process, alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from dufu.layers.random import normal_block
from dufu.layers.split import SplitRule

_CHUNK = 1 << 20  # elements generated at a time, so that filling a large tensor needs little extra memory


class Initial(Protocol):
    """A rule for the values of a parameter before training."""

    def fill(self, out: Tensor, seed: int, name: str, row: int, col: int) -> None:
        """Fill `out` (rows, cols) with the rectangle of the parameter `name` that begins at (row, col)."""

    def draw(self, out: Tensor) -> None:
        """Fill a whole parameter from PyTorch's generator."""


@dataclass(frozen=True)
class Normal:
    """Gaussian with the given standard deviation."""

    std: float = 0.02

    def fill(self, out: Tensor, seed: int, name: str, row: int, col: int) -> None:
        """See Initial."""
        rows, cols = out.shape
        width = min(_CHUNK, max(1, cols))  # a row of stacked weights is a whole matrix
        step = max(1, _CHUNK // width)
        for start in range(0, rows, step):
            for left in range(0, cols, width):
                part = out[start : start + step, left : left + width]
                block = normal_block(seed, name, row + start, part.shape[0], col + left, part.shape[1], out.device)
                part.copy_(block.mul_(self.std))

    def draw(self, out: Tensor) -> None:
        """See Initial."""
        out.normal_(0.0, self.std)


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float = 0.0

    def fill(self, out: Tensor, seed: int, name: str, row: int, col: int) -> None:
        """See Initial."""
        out.fill_(self.value)

    def draw(self, out: Tensor) -> None:
        """See Initial."""
        out.fill_(self.value)


@dataclass(frozen=True)
class Given:
    """Values that are known."""

    values: Tensor

    def fill(self, out: Tensor, seed: int, name: str, row: int, col: int) -> None:
        """See Initial."""
        matrix = self.values.reshape(self.values.shape[0] if self.values.dim() else 1, -1)
        out.copy_(matrix[row : row + out.shape[0], col : col + out.shape[1]])

    def draw(self, out: Tensor) -> None:
        """See Initial."""
        out.copy_(self.values)


@dataclass(frozen=True)
class ZeroRow:
    """Another rule, but one row is zero: an embedding's padding row.

    Args:
        rule: for all other rows.
        row: number of the row that is zero.
    """

    rule: Initial
    row: int

    def fill(self, out: Tensor, seed: int, name: str, row: int, col: int) -> None:
        """See Initial."""
        self.rule.fill(out, seed, name, row, col)
        if row <= self.row < row + out.shape[0]:
            out[self.row - row].zero_()

    def draw(self, out: Tensor) -> None:
        """See Initial."""
        self.rule.draw(out)
        out[self.row].zero_()


class Described(nn.Module):
    """A module that can say how each of its own parameters begins and how it may be split.

    A subclass sets `initial` (parameter name → rule) and, where it can be split over tensor-parallel processes, `splits`.
    """

    initial: dict[str, Initial]
    splits: dict[str, SplitRule] = {}  # noqa: RUF012 - a default that nobody changes in place

    def fill_alone(self) -> None:
        """Fill the parameters from PyTorch's generator: the layer used outside dufu, as any layer is."""
        with torch.no_grad():
            for name, rule in self.initial.items():
                parameter = getattr(self, name, None)
                if parameter is not None and not parameter.is_meta:
                    rule.draw(parameter)
