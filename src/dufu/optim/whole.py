"""Optimizers that need sums over whole parameters, wherever the parts of a parameter lie.

The training code hands such an optimizer tensors that may hold a parameter, a part of one, or stretches of several, and calls `bind` to
say what lies where and how to sum over processes. Unbound, every tensor is one whole parameter, as in anybody's own loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dufu.errors import DufuError

Shape = tuple[int, ...]
Blocks = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class Part:
    """A stretch of one parameter inside a tensor that the optimizer updates.

    Args:
        name: the parameter's.
        start: first element of the stretch within the flat tensor.
        blocks: the rectangles (row, rows, column, columns) of the whole parameter's matrix that the stretch holds one after another, each
            row by row; the matrix is (first dimension) × (all others).
        counted: whether this copy enters sums; of equal copies on several processes exactly one does.
    """

    name: str
    start: int
    blocks: Blocks
    counted: bool = True

    @cached_property
    def length(self) -> int:
        """Return the number of elements."""
        return sum(rows * cols for _, rows, _, cols in self.blocks)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the stretch as a flat view of a tensor that is laid out like the one it lies in."""
        return tensor.view(-1)[self.start : self.start + self.length]

    def rectangles(self, tensor: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (rows of the whole, columns of the whole, view) of each rectangle."""
        flat, offset = self.of(tensor), 0
        for row, rows, col, cols in self.blocks:
            yield slice(row, row + rows), slice(col, col + cols), flat[offset : offset + rows * cols].view(rows, cols)
            offset += rows * cols


def matrix_of(shape: Shape) -> tuple[int, int]:
    """Return (rows, columns) of the matrix that a parameter is seen as: a vector is one column, a number one row of it."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


class WholeParameterOptimizer(torch.optim.Optimizer):
    """Base of optimizers whose update of an element depends on sums over its whole parameter.

    A subclass gives `step`, uses `parts` and `shapes`, and calls `sum_` on one packed tensor that has a place for every parameter of
    `shapes`, in that order, on every process. A tensor without a gradient counts as one with a gradient of zeros.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.parts: dict[Tensor, Sequence[Part]] = {}
        self.shapes: dict[str, Shape] = {}
        self.sum_: Callable[[Tensor], object] = lambda packed: None

    def bind(self, parts: Mapping[Tensor, Sequence[Part]], shapes: Mapping[str, Shape], sum_: Callable[[Tensor], object]) -> None:
        """Say where parameters lie; once, before the first step.

        Args:
            parts: for every tensor of the groups the stretches it holds; what no stretch covers only pads and is left alone.
            shapes: the whole shape of every trained parameter of the model, in the same order on every process.
            sum_: sums a tensor in place over all processes that hold counted parts.
        """
        self.parts, self.shapes, self.sum_ = dict(parts), dict(shapes), sum_

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state that is not of a tensor's shape: kind → parameter → tensor, the same on every process, for a checkpoint.

        The tensors are the state itself: filling them in place restores it.
        """
        return {}

    def settle(self) -> list[Tensor]:
        """Return all tensors in the groups' order; unbound, describe each as one whole parameter.

        Raises:
            DufuError: tensors were added after the first step.
        """
        tensors: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        if not self.parts:
            self.shapes = {str(i): tuple(p.shape) for i, p in enumerate(tensors)}
            self.parts = {
                p: [Part(name, 0, ((0, rows, 0, cols),))]
                for p, (name, (rows, cols)) in zip(tensors, ((n, matrix_of(s)) for n, s in self.shapes.items()))
            }
        if any(p not in self.parts for p in tensors):
            raise DufuError(f"{type(self).__name__}: parameters were added after the first step; give all to the constructor")
        return tensors

    def gradient(self, tensor: Tensor) -> Tensor:
        """Return a tensor's gradient in at least single precision; zeros where it has none."""
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        return torch.zeros_like(tensor, dtype=dtype) if tensor.grad is None else tensor.grad.to(dtype)
