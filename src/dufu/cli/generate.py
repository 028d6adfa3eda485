"""`dufu generate`."""

from __future__ import annotations


def command() -> None:
    """Placeholder."""


command.verb = "generate"  # type: ignore[attr-defined]
