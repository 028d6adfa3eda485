"""Which rectangles of a global tensor lie in a stretch of local memory.

One description serves filling initial weights, saving, loading into another layout, and importing: a tensor is seen as a matrix
(first dimension × the rest), and a `Region` lists, in the order of local memory, the rectangles that lie there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from dufu.layers.split import SplitRule


@dataclass(frozen=True)
class Block:
    """A rectangle: `rows` rows from `row`, `cols` columns from `col`."""

    row: int
    rows: int
    col: int
    cols: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.rows * self.cols


@dataclass(frozen=True)
class Region:
    """Rectangles in the order of local memory, each stored row by row."""

    blocks: tuple[Block, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return sum(block.numel for block in self.blocks)

    def cut(self, start: int, stop: int) -> Region:
        """Return the region of the elements `start … stop-1` of this region's memory."""
        found: list[Block] = []
        offset = 0
        for block in self.blocks:
            low, high = max(start - offset, 0), min(stop - offset, block.numel)
            offset += block.numel
            if low >= high:
                continue
            found.extend(_rectangles(block, low, high))
        return Region(tuple(found))

    def within(self, outer: Block) -> Region:
        """Return where this region lies in a larger tensor of which the one it describes is the rectangle `outer`."""
        return Region(tuple(Block(outer.row + b.row, b.rows, outer.col + b.col, b.cols) for b in self.blocks))

    def views(self, memory: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """Yield each rectangle with its (rows, cols) view of the flat local memory."""
        offset = 0
        for block in self.blocks:
            yield block, memory[offset : offset + block.numel].view(block.rows, block.cols)
            offset += block.numel

    def to_json(self) -> list[list[int]]:
        """Return the rectangles as lists of numbers."""
        return [[b.row, b.rows, b.col, b.cols] for b in self.blocks]

    @staticmethod
    def from_json(blocks: list[list[int]]) -> Region:
        """Return the region that `to_json` described."""
        return Region(tuple(Block(*map(int, b)) for b in blocks))


def _rectangles(block: Block, low: int, high: int) -> Iterator[Block]:
    """Yield the at most three rectangles of elements `low … high-1` of a block: a row's end, whole rows, a row's beginning."""
    cols = block.cols
    first, last = low // cols, high // cols
    if low % cols:
        stop = min(high, (first + 1) * cols)
        yield Block(block.row + first, 1, block.col + low % cols, stop - low)
        if stop == high:
            return
        first += 1
    if last > first:
        yield Block(block.row + first, last - first, block.col, cols)
    if high % cols:
        yield Block(block.row + last, 1, block.col, high % cols)


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of the matrix that a tensor of this shape is seen as."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def whole_region(shape: tuple[int, ...]) -> Region:
    """Return the region of a tensor that lies here whole."""
    rows, cols = as_matrix(shape)
    return Region((Block(0, rows, 0, cols),)) if rows * cols else Region(())


def split_region(shape: tuple[int, ...], rule: SplitRule, rank: int, size: int) -> tuple[tuple[int, ...], Region]:
    """Return the local shape and region of part `rank` of `size` of a tensor.

    The lengths must divide, unless the rule pads: then the last parts hold fewer real rows than their shape says.
    """
    rows, cols = as_matrix(shape)
    length = shape[rule.dim]
    local = -(-length // size)
    new_shape = (*shape[: rule.dim], local, *shape[rule.dim + 1 :])
    spans: list[tuple[int, int]] = []
    if rule.padded:
        start = min(rank * local, length)
        spans.append((start, min(local, length - start)))
    else:
        offset = 0
        for section in rule.sections or (length,):
            spans.append((offset + rank * (section // size), section // size))
            offset += section
    if rule.dim == 0:
        return new_shape, Region(tuple(Block(start, count, 0, cols) for start, count in spans if count))
    if rule.dim != 1:
        raise AssertionError("only the first two dimensions are ever split")
    inner = math.prod(shape[2:])
    if len(spans) == 1:
        start, count = spans[0]
        return new_shape, Region((Block(0, rows, start * inner, count * inner),))
    # Several column stretches a row: local memory holds them row by row.
    blocks = [Block(row, 1, start * inner, count * inner) for row in range(rows) for start, count in spans]
    return new_shape, Region(tuple(blocks))


def copy_overlap(target: Tensor, target_region: Region, source: Tensor, source_region: Region) -> int:
    """Copy what two regions share from one flat memory to another; return the number of elements copied."""
    copied = 0
    sources = list(source_region.views(source))
    for mine, out in target_region.views(target):
        for theirs, data in sources:
            row, stop_row = max(mine.row, theirs.row), min(mine.row + mine.rows, theirs.row + theirs.rows)
            col, stop_col = max(mine.col, theirs.col), min(mine.col + mine.cols, theirs.col + theirs.cols)
            if row >= stop_row or col >= stop_col:
                continue
            out[row - mine.row : stop_row - mine.row, col - mine.col : stop_col - mine.col].copy_(
                data[row - theirs.row : stop_row - theirs.row, col - theirs.col : stop_col - theirs.col]
            )
            copied += (stop_row - row) * (stop_col - col)
    return copied
