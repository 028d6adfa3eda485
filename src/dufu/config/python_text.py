"""A config as Python text, for reading and for comparing two runs line by line."""

from __future__ import annotations

from typing import Any

WIDTH = 100


def assignments(value: Any, prefix: str) -> str:
    """Return plain data as Python assignments, one a line, keys sorted.

    Args:
        value: dicts, lists and scalars; a dict with `_target_` is written as the call that it records.
        prefix: the name that every assignment begins with; "" for none.
    """
    return "\n".join(_lines(value, prefix))


def _lines(value: Any, path: str) -> list[str]:
    if isinstance(value, dict) and value and "_target_" not in value and all(str(k).isidentifier() for k in value):
        return [line for key in sorted(value) for line in _lines(value[key], f"{path}.{key}" if path else str(key))]
    flat = f"{path} = {expression(value)}"
    return [flat if len(flat) <= WIDTH else f"{path} = {expression(value, 0)}"]


def expression(value: Any, indent: int | None = None) -> str:
    """Return an expression on one line, or, with an indent, one item a line."""
    if isinstance(value, dict) and isinstance(value.get("_target_"), str):
        items = [(f"{k}=", v) for k, v in sorted(value.items()) if k != "_target_"]
        return _bracket(f"{value['_target_']}(", items, ")", indent)
    if isinstance(value, dict):
        return _bracket("{", [(f"{k!r}: ", v) for k, v in sorted(value.items(), key=lambda kv: str(kv[0]))], "}", indent)
    if isinstance(value, list):
        return _bracket("[", [("", v) for v in value], "]", indent)
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    return repr(value)


def _bracket(start: str, items: list[tuple[str, Any]], end: str, indent: int | None) -> str:
    flat = start + ", ".join(name + expression(item) for name, item in items) + end
    if indent is None or len(flat) + indent + 4 <= WIDTH:
        return flat
    pad = " " * (indent + 4)
    return start + "\n" + "".join(f"{pad}{name}{expression(item, indent + 4)},\n" for name, item in items) + " " * indent + end
