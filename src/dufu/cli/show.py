"""`dufu show`."""

from __future__ import annotations


def command() -> None:
    """Placeholder."""


command.verb = "show"  # type: ignore[attr-defined]
