"""Our weights out of foreign tensors: any rectangle of any parameter, read when it is needed, without the rest of its file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dufu.errors import CheckpointError
from dufu.interchange.folder import Tensors
from dufu.models.names import Part, Rule, Shape, Table
from dufu.parallel.parameters import Piece
from dufu.parallel.region import Block, Region, as_matrix

WEIGHT = "weight"
_BUFFER = 1 << 20  # numbers read at a time: few enough to be looked at while they are still in the processor's cache
_MANY = 4  # parts of one foreign tensor from which on it is read whole


class WeightSource(Protocol):
    """Where weights come from: a checkpoint, or a folder in another format."""

    folder: Path

    def compare(self, shapes: Mapping[str, Shape], allow_missing: Sequence[str], allow_unexpected: Sequence[str]) -> set[str]:
        """Return which parameters it lacks by permission.

        Raises:
            CheckpointError: names are missing, unexpected or misshaped without permission; all are listed.
        """

    def read(self, name: str, shape: Shape, region: Region, memory: Tensor) -> None:
        """Fill flat memory with a region of a parameter."""


def refuse_names(where: object, problems: Sequence[str]) -> None:
    """Raise CheckpointError that lists how a source's names differ from the model's, if they do."""
    if problems:
        more = f" and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise CheckpointError(f"{where} is of another model: {'; '.join(problems[:12])}{more}")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Say whether a name is meant by one of several patterns: `*` stands for any text, and a pattern may name a beginning."""
    return any(re.fullmatch(".*".join(map(re.escape, pattern.split("*"))) + r"(\..*)?", name) for pattern in patterns)


class ForeignWeights:
    """Our parameters, out of the tensors of another format.

    Args:
        tensors: the files' tensors.
        table: how they are called and shaped.
        shapes: of our parameters.
    """

    def __init__(self, tensors: Tensors, table: Table, shapes: Mapping[str, Shape]) -> None:
        self.folder, self.tensors, self.table, self.shapes = tensors.where, tensors, table, dict(shapes)
        self._needed = table.foreign_shapes(shapes)
        self._rules: dict[str, Rule] = {rule.ours: rule for rule in table.rules}
        self._parts = {rule.ours: Counter(part.name for part in rule.parts) for rule in table.rules}
        self._padded = {part.name for rule in table.rules if rule.padded for part in rule.parts}
        self._found = {table.current_name(name, self._needed): name for name in tensors.names() if not table.ignores(name)}
        if len(self._found) < sum(not table.ignores(name) for name in tensors.names()):
            raise CheckpointError(
                f"{self.folder}: two of its tensors stand for the same one, by an old name and by the present one"
            )
        self.spare = sorted(n for n in self._found if any(re.fullmatch(pattern, n) for pattern in table.spare))
        self._whole: tuple[str, Tensor] | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def compare(
        self, shapes: Mapping[str, Shape], allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = ()
    ) -> set[str]:
        """See WeightSource; names may be ours or theirs."""
        problems: list[str] = []
        lacking: set[str] = set()
        replaced: set[str] = set()  # of an old head in the place of which a new one of another size begins
        for ours, rule in self._rules.items():
            names = dict.fromkeys(part.name for part in rule.parts)
            other = {n for n in names if n in self._found and not self._fits(n, self.tensors.shape(self._found[n]))}
            if other and other == set(names) and (matches(ours, allow_missing) or all(matches(n, allow_missing) for n in other)):
                lacking.add(ours)
                replaced |= other
                continue
            absent = [name for name in names if name not in self._found]
            if not absent:
                continue
            if ours in self.table.optional and len(absent) == len(names):
                continue
            allowed = matches(ours, allow_missing) or all(matches(name, allow_missing) for name in absent)
            if allowed and len(absent) == len(names):
                lacking.add(ours)
            else:
                problems += [f"missing {name}" for name in absent]
        for name, original in self._found.items():
            if name in self.table.copies:
                problems += self._differing_copy(name)
            elif name in self.spare:
                continue
            elif name not in self._needed:
                problems += [] if matches(original, allow_unexpected) else [f"unexpected {original}"]
            elif name not in replaced and not self._fits(name, self.tensors.shape(original)):
                problems.append(f"{original} is {list(self.tensors.shape(original))} instead of {list(self._needed[name])}")
        refuse_names(self.folder, list(dict.fromkeys(problems)))
        return lacking

    def _fits(self, name: str, shape: Shape) -> bool:
        needed = self._needed[name]
        if name in self._padded:
            return shape[1:] == needed[1:] and shape[0] >= needed[0]
        return shape == needed

    def _differing_copy(self, name: str) -> list[str]:
        """Return what is wrong with a tied tensor that the file holds twice."""
        other = self.table.copies[name]
        if other not in self._found:
            return []
        one, two = self._found[name], self._found[other]
        if self.tensors.shape(one) != self.tensors.shape(two):
            return [f"{one} is {list(self.tensors.shape(one))} instead of {list(self.tensors.shape(two))}, to which it is tied"]
        rows, cols = as_matrix(self.tensors.shape(one))
        step = max(1, _BUFFER // max(1, cols))
        for first in range(0, rows, step):
            count = min(step, rows - first)
            if not torch.equal(self.tensors.rows(one, first, count), self.tensors.rows(two, first, count)):
                return [f"{one} differs from {two}, to which config.json ties it"]
        return []

    def read(self, name: str, shape: Shape, region: Region, memory: Tensor) -> None:
        """See WeightSource.

        Raises:
            CheckpointError: a value that is no finite number.
        """
        rule = self._rules[name]
        if name in self.table.optional and rule.parts[0].name not in self._found:
            memory[: region.numel].zero_()
            return
        for block, out in region.views(memory):
            done = 0
            for part in rule.parts:
                if (straight := self._straight(rule, part, block, shape, out)) is not None:
                    done += straight
                    continue
                for rows, cols, values in self._overlap(rule, part, block, shape):
                    out[rows, cols] = values.to(out.dtype)
                    done += values.numel()
            if done != block.numel:
                raise AssertionError(f"the table of names covers {done} of {block.numel} numbers of {name}")

    def _straight(self, rule: Rule, part: Part, block: Block, shape: Shape, out: Tensor) -> int | None:
        """Read whole rows straight into their place; return how many numbers, None where that cannot be done."""
        rows, cols = as_matrix(shape)
        name = self._found[part.name]
        if part.matrix or part.transposed or (block.col, block.cols) != (0, cols) or self._parts[rule.ours][part.name] > _MANY:
            return None
        last = part.row + (rows - part.row if part.rows is None else part.rows)
        low, high = max(block.row, part.row), min(block.row + block.rows, last)
        step = max(1, _BUFFER // max(1, cols))
        for first in range(low, high, step):
            piece = out[first - block.row : min(high, first + step) - block.row]
            if not self.tensors.read_into(name, part.start + first - part.row, piece):
                return None
            self._check(name, piece)
        return max(0, high - low) * cols

    def _overlap(self, rule: Rule, part: Part, block: Block, shape: Shape) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield what a part gives of a block: rows and columns within the block, and the values."""
        rows = as_matrix(shape)[0]
        last = part.row + (rows - part.row if part.rows is None else part.rows)
        low, high = max(block.row, part.row), min(block.row + block.rows, last)
        if low >= high:
            return
        many = self._parts[rule.ours][part.name] > _MANY
        if part.matrix is None:
            left, right = block.col, block.col + block.cols
            first = part.start + low - part.row
            for start, stop, values in self._rectangle(part, first, first + high - low, left, right, many):
                yield slice(low - block.row + start, low - block.row + stop), slice(0, block.cols), values
            return
        # The row holds a matrix of its own: whole rows of it are read, and the stretch that the block wants is cut out.
        inner_rows, inner_cols = part.matrix
        left = max(block.col, part.col)
        right = min(block.col + block.cols, part.col + inner_rows * inner_cols)
        if left >= right:
            return
        top, bottom = (left - part.col) // inner_cols, -(-(right - part.col) // inner_cols)
        step = max(1, _BUFFER // inner_cols)
        for start in range(top, bottom, step):
            stop = min(bottom, start + step)
            pieces = [values.clone() for _, _, values in self._rectangle(part, start, stop, 0, inner_cols, many)]
            flat = torch.cat(pieces).reshape(-1)
            begin, end = max(left, part.col + start * inner_cols), min(right, part.col + stop * inner_cols)
            offset = part.col + start * inner_cols
            line = slice(low - block.row, low - block.row + 1)
            yield line, slice(begin - block.col, end - block.col), flat[begin - offset : end - offset].unsqueeze(0)

    def _rectangle(self, part: Part, top: int, bottom: int, left: int, right: int, many: bool) -> Iterator[tuple[int, int, Tensor]]:
        """Yield a foreign tensor's rectangle in our orientation: first and last row, counted from `top`, and the values."""
        name = self._found[part.name]
        rows, cols = as_matrix(self.tensors.shape(name))
        if part.transposed:
            # What we call columns are its rows; they are read in turns, whole, and put together.
            whole = self._read(name, left, right - left, rows, cols, many)
            yield 0, bottom - top, whole[:, top:bottom].t()
            return
        step = max(1, _BUFFER // max(1, cols))
        for first in range(top, bottom, step):
            count = min(step, bottom - first)
            values = self._read(name, first, count, rows, cols, many)
            yield first - top, first - top + count, values[:, left:right]

    def _read(self, name: str, first: int, count: int, rows: int, cols: int, many: bool) -> Tensor:
        if many:
            if self._whole is None or self._whole[0] != name:
                self._whole = None
                self._whole = (name, self._finite_rows(name, 0, rows))
            return self._whole[1][first : first + count]
        size = count * cols * 8
        if len(self._scratch) < size <= 16 * _BUFFER:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._finite_rows(name, first, count, self._scratch)

    def _finite_rows(self, name: str, first: int, count: int, scratch: Tensor | None = None) -> Tensor:
        values = self.tensors.rows(name, first, count, scratch)
        self._check(name, values)
        return values

    def _check(self, name: str, values: Tensor) -> None:
        if not values.is_floating_point():
            raise CheckpointError(f"{self.folder}: {name} is of type {values.dtype}, which holds no weights")
        if not torch.isfinite(values.sum(dtype=torch.float32 if values.dtype != torch.float64 else None)) and not bool(
            torch.isfinite(values).all()
        ):
            raise CheckpointError(f"{self.folder}: {name} holds values that are no finite numbers")


def fill_piece(source: WeightSource, piece: Piece, memory: Tensor) -> None:
    """Fill a piece's stretch of flat memory from a source; padding becomes zero."""
    memory[piece.region.numel :].zero_()
    source.read(piece.info.name, piece.info.shape, piece.region, memory)
