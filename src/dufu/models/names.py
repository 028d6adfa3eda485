"""Names and shapes in other formats: which rows of which foreign tensor are which rows of one of our parameters.

A parameter is seen as a matrix, its first dimension × the rest, as everywhere in dufu. A table lists for each parameter the foreign
tensors that it is made of; it is read in both directions, and can be printed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dufu.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A stretch of our rows that lies in a foreign tensor.

    Args:
        name: of the foreign tensor.
        row: our first row.
        rows: how many; None = all that follow.
        start: the row of the foreign matrix (transposed, where `transposed`) that holds our first one.
        transposed: whether the foreign matrix is stored the other way round.
        matrix: one of our rows holds, from column `col` on, this whole (rows, columns) matrix, one row after the other: an expert of a
            stack. None = our rows are foreign rows.
        col: see `matrix`.
    """

    name: str
    row: int = 0
    rows: int | None = None
    start: int = 0
    transposed: bool = False
    matrix: tuple[int, int] | None = None
    col: int = 0


@dataclass(frozen=True)
class Rule:
    """Where one of our parameters lies in another format.

    Args:
        ours: our parameter.
        parts: in any order; together they cover it exactly.
        padded: the foreign tensor may have more rows than we have (a vocabulary rounded up); they are left out, and written as zeros.
    """

    ours: str
    parts: tuple[Part, ...]
    padded: bool = False

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """Return the shapes of the foreign tensors that a parameter of this shape is made of."""
        found: dict[str, Shape] = {}
        for part in self.parts:
            if part.matrix is not None:
                rows, cols = part.matrix
                found[part.name] = (cols, rows) if part.transposed else (rows, cols)
                continue
            if not shape:  # a single number
                found[part.name] = ()
                continue
            rows = part.start + (shape[0] - part.row if part.rows is None else part.rows)
            rows = max(rows, (found.get(part.name) or (0,))[-1 if part.transposed else 0])
            found[part.name] = (*shape[1:][::-1], rows) if part.transposed else (rows, *shape[1:])
        return found

    def __str__(self) -> str:
        """Write the rule as a line of a table."""
        shown = []
        for part in self.parts[:4]:
            whole = part.start == 0 and part.rows is None
            rows = "" if whole or part.matrix else f"[{part.start}:{'' if part.rows is None else part.start + part.rows}]"
            shown.append(f"{part.name}{rows}{'ᵀ' if part.transposed else ''}")
        more = f" + {len(self.parts) - 4} more" if len(self.parts) > 4 else ""
        return f"{self.ours} = {' + '.join(shown)}{more}"


def same(ours: str, theirs: str, padded: bool = False) -> Rule:
    """Our parameter is their tensor."""
    return Rule(ours, (Part(theirs),), padded)


def turned(ours: str, theirs: str) -> Rule:
    """Our matrix is their matrix, transposed."""
    return Rule(ours, (Part(theirs, transposed=True),))


def joined(ours: str, theirs: Sequence[tuple[str, int]], transposed: bool = False) -> Rule:
    """Our rows are the rows of several of their tensors, one tensor after the other.

    Args:
        theirs: name and number of rows (as we count them) of each.
        transposed: whether each is stored the other way round.
    """
    parts, row = [], 0
    for name, rows in theirs:
        parts.append(Part(name, row, rows, transposed=transposed))
        row += rows
    return Rule(ours, tuple(parts))


def by_head(ours: str, theirs: str, heads: int, head_size: int, kinds: int = 3, transposed: bool = False) -> Rule:
    """Their rows go head by head, each with its query, key and value; ours are all queries, all keys, all values.

    Args:
        kinds: tensors fused: 3 for query, key and value, 2 for key and value.
    """
    parts = [
        Part(theirs, (kind * heads + head) * head_size, head_size, (head * kinds + kind) * head_size, transposed)
        for head in range(heads)
        for kind in range(kinds)
    ]
    return Rule(ours, tuple(parts))


def pairwise(ours: str, theirs: str, heads: int, head_size: int, rotated: int | None = None, row: int = 0) -> tuple[Part, ...]:
    """Return parts for rows whose rotary pairs lie side by side there (0 1, 2 3, …), half a head apart here.

    Args:
        rotated: features of a head that are rotated; None = all.
        row: our first row of these heads.
    """
    turn, parts = rotated or head_size, []
    for head in range(heads):
        first = head * head_size
        for feature in range(turn):
            there = 2 * feature if feature < turn // 2 else 2 * (feature - turn // 2) + 1
            parts.append(Part(theirs, row + first + feature, 1, first + there))
        if turn < head_size:
            parts.append(Part(theirs, row + first + turn, head_size - turn, first + turn))
    return tuple(parts)


def experts(ours: str, theirs: Sequence[Sequence[str]], matrix: tuple[int, int], transposed: bool = False) -> Rule:
    """Our stack of experts is made of matrices of their own, one or several (gate, up) for each expert.

    Args:
        theirs: for each expert the names of its matrices, in our order.
        matrix: our (rows, columns) of each of them.
        transposed: whether they are stored the other way round.
    """
    size = matrix[0] * matrix[1]
    parts = [
        Part(name, number, 1, 0, transposed, matrix, place * size)
        for number, names in enumerate(theirs)
        for place, name in enumerate(names)
    ]
    return Rule(ours, tuple(parts))


@dataclass(frozen=True)
class Table:
    """How a model's parameters are called and shaped in another format.

    Args:
        rules: one for each of our parameters.
        ignored: patterns (whole-name regular expressions) of foreign names that hold no weight, such as mask and position buffers.
        copies: foreign names that repeat another foreign tensor (tied weights): they may be in a file, equal to the other, or not.
        prefix: which a file made from the model without its head leaves out, such as "transformer.".
        spare: patterns of weights of other heads that published folders hold beside this model's; they are left out, and named.
        optional: our parameters that a file may lack, which then are zeros.
        old_names: (pattern, replacement) of names from older versions, such as (r"\\.gamma$", ".weight").
    """

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    old_names: tuple[tuple[str, str], ...] = ()
    optional: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()

    def rule_of(self, ours: str) -> Rule:
        """Return the rule of one of our parameters.

        Raises:
            CheckpointError: there is none.
        """
        for rule in self.rules:
            if rule.ours == ours:
                return rule
        raise CheckpointError(f"{ours} has no place in this format")

    def foreign_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the shapes of all foreign tensors, given those of our parameters.

        Raises:
            CheckpointError: our parameters and the table's differ; both are listed.
        """
        unknown, left = set(shapes) - {rule.ours for rule in self.rules}, {rule.ours for rule in self.rules} - set(shapes)
        if unknown or left:
            raise CheckpointError(
                f"the table of names does not fit the model: no rule for {sorted(unknown)[:6]}, no parameter for {sorted(left)[:6]}"
            )
        found: dict[str, Shape] = {}
        for rule in self.rules:
            found.update(rule.shapes(shapes[rule.ours]))
        return found

    def ignores(self, name: str) -> bool:
        """Say whether a foreign name holds no weight."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def current_name(self, name: str, known: Mapping[str, Shape]) -> str:
        """Return today's whole name of a tensor in a file: old names renewed, a missing prefix added, a superfluous one removed."""
        for pattern, replacement in self.old_names:
            name = re.sub(pattern, replacement, name)
        if name in known or name in self.copies or not self.prefix:
            return name
        for other in (f"{self.prefix}{name}", name.removeprefix(self.prefix)):
            if other in known or other in self.copies:
                return other
        return name

    def __str__(self) -> str:
        """Write the table, a line a parameter."""
        return "\n".join([*map(str, self.rules), *(f"({name} repeats {other})" for name, other in self.copies.items())])


def renamed(table: Table, change: Callable[[str], str]) -> Table:
    """Return a table whose foreign names are changed by a function."""
    rules = tuple(replace(rule, parts=tuple(replace(p, name=change(p.name)) for p in rule.parts)) for rule in table.rules)
    return replace(table, rules=rules, copies={change(a): change(b) for a, b in table.copies.items()})


def each(count: int, make: Callable[[int], Sequence[Rule]]) -> Iterator[Rule]:
    """Yield the rules of every layer."""
    for number in range(count):
        yield from make(number)
