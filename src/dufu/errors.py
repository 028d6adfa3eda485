"""The project's exceptions.

A user's mistake raises a `DufuError`; the command line prints it as one line that begins `error:` and exits with status 2.
Anything else is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DufuError(Exception):
    """A user's mistake: what is wrong, where, and the nearest value that would do."""


class ConfigError(DufuError):
    """An unknown, misplaced or wrongly typed key, or two places that disagree."""


class LayoutError(DufuError):
    """A layout that cannot exist: a size that does not divide, too few ranks."""


class DataError(DufuError):
    """A file that cannot be read as what it should be."""


class CheckpointError(DufuError):
    """A checkpoint that is missing, incomplete, damaged or of another model."""


class NotBuiltError(DufuError):
    """A feature that is planned but does not exist yet; raised before any work is spent."""


class NonFiniteError(DufuError):
    """The loss or a gradient stopped being a number."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `'; did you mean "x"?'` for the closest known name, or a list of the known names when none is close."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.55)
    if close:
        return f'; did you mean "{close[0]}"?'
    if names and len(names) <= 12:
        return f"; known: {', '.join(names)}"
    return ""
