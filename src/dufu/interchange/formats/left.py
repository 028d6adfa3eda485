"""Rows of foreign tensors for which our model has no place, such as a padded vocabulary's: kept, so that they can be put back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dufu.interchange.folder import Tensors
from dufu.models.names import Shape, Table

LEFT = "left_out.safetensors"


def left_out(table: Table, tensors: Tensors, shapes: Mapping[str, Shape], made: set[str]) -> dict[str, Tensor]:
    """Return rows that no rule takes, as name@first row.

    Args:
        shapes: of our parameters.
        made: names that lie in no file.
    """
    needed = table.foreign_shapes(shapes)
    taken: dict[str, list[tuple[int, int]]] = {}
    for rule in table.rules:
        for part in rule.parts:
            rows = shapes[rule.ours][0] - part.row if part.rows is None else part.rows
            whole = part.transposed or part.matrix is not None
            taken.setdefault(part.name, []).append((0, needed[part.name][0]) if whole else (part.start, part.start + rows))
    found: dict[str, Tensor] = {}
    for original in tensors.names():
        name = table.current_name(original, needed)
        if name not in taken or name in made:
            continue
        total, at = tensors.shape(original)[0], 0
        for first, last in [*sorted(taken[name]), (total, total)]:
            if first > at:
                values = tensors.rows(original, at, first - at)
                found[f"{name}@{at}"] = values.reshape(first - at, *tensors.shape(original)[1:]).clone()
            at = max(at, last)
    return found


def put_back(left: Mapping[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Put rows that were left out into foreign tensors of the same width; they may make them longer."""
    for key, rows in left.items():
        name, _, at = key.rpartition("@")
        first = int(at)
        value = tensors.get(name)
        if value is None or value.shape[1:] != rows.shape[1:]:
            continue
        lacking = first + rows.shape[0] - value.shape[0]
        if lacking > 0:
            value = torch.cat([value, value.new_zeros(lacking, *value.shape[1:])])
        value[first : first + rows.shape[0]] = rows.to(value.dtype)
        tensors[name] = value
