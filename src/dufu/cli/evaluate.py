"""`dufu eval`."""

from __future__ import annotations


def command() -> None:
    """Placeholder."""


command.verb = "eval"  # type: ignore[attr-defined]
