"""What a callable accepts: its arguments, their types and defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union, get_type_hints

from dufu.config.configurable import reads_cfg_itself, takes_cfg

NO_DEFAULT = inspect.Parameter.empty


@dataclass(frozen=True)
class Argument:
    """One argument of a callable.

    Args:
        name: its name.
        annotation: its type; Any where none is written or it cannot be evaluated.
        written: the type as it stands in the source.
        default: its default, or NO_DEFAULT.
    """

    name: str
    annotation: Any
    written: str
    default: Any

    @property
    def accepted(self) -> Any:
        """Return the type that a config's value must have: null is fine where it is the default."""
        nullable = self.default is None and self.annotation is not Any
        return Union[self.annotation, None] if nullable else self.annotation  # noqa: UP007 - some annotations know no `|`


@dataclass(frozen=True)
class Signature:
    """The arguments of a callable.

    Args:
        arguments: those with a name.
        open: whether it takes any further keyword, or has no signature to read.
        cfg: whether one `cfg` may hold the arguments.
        free_cfg: whether what `cfg` holds is the class's own affair (it has `from_config`).
    """

    arguments: Mapping[str, Argument]
    open: bool
    cfg: bool
    free_cfg: bool


@functools.lru_cache(maxsize=256)
def signature_of(target: Any) -> Signature:
    """Return what a callable accepts by keyword."""
    cfg = takes_cfg(target)
    free = reads_cfg_itself(target)
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return Signature({}, True, cfg, free)
    hints = _hints(target)
    arguments = {
        p.name: Argument(p.name, hints.get(p.name, Any), _written(p.annotation), p.default)
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    return Signature(arguments, any(p.kind is p.VAR_KEYWORD for p in parameters), cfg, free)


def _function(target: Any) -> Any:
    """Return the plain function whose annotations a call obeys."""
    if inspect.isclass(target):
        target = target.__init__ if target.__init__ is not object.__init__ else target.__new__
    return inspect.unwrap(target)


def _hints(target: Any) -> dict[str, Any]:
    function = _function(target)
    try:
        return get_type_hints(function)
    except Exception:  # one annotation that cannot be evaluated must not cost the others
        found = {}
        space = getattr(function, "__globals__", {})
        for name, annotation in getattr(function, "__annotations__", {}).items():
            try:
                found[name] = eval(annotation, dict(space)) if isinstance(annotation, str) else annotation
            except Exception:
                continue
        return found


def _written(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
