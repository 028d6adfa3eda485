"""A value as its declared type, where nothing is lost; otherwise one clear line."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from dufu.config.resolve import resolve
from dufu.errors import ConfigError, nearest

_TRUE, _FALSE = {"true", "on", "yes"}, {"false", "off", "no"}
_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
_MAPPINGS = (dict, collections.abc.Mapping)


def coerce(value: Any, annotation: Any, where: str, *, builds: bool = False) -> Any:
    """Return `value` as the annotated type where nothing is lost (`"1e-4"` for a float, `1e3` for an int).

    Args:
        value: what was written.
        annotation: the declared type; a type that dufu does not know accepts everything.
        where: the key, for messages.
        builds: whether a recorded call may stand here because it will be built.

    Raises:
        ConfigError: it is of another type; the message names the key, the value and the type.
    """
    if annotation is Any or (builds and isinstance(value, Mapping) and "_target_" in value):
        return value
    origin = get_origin(annotation) or annotation
    if origin is Annotated:
        return coerce(value, get_args(annotation)[0], where, builds=builds)
    if origin in (Union, types.UnionType):
        return _one_of(value, get_args(annotation), where, builds)
    if origin is Literal:
        return _literal(value, get_args(annotation), where)
    if annotation in (None, type(None)):
        if value is None:
            return None
        raise _wrong(value, "null", where)
    if not _is_simple(annotation):
        return _as_object(value, annotation, where)
    if value is None:
        raise _wrong(value, described(annotation), where)
    if origin in _LISTS:
        return _list(value, annotation, where, builds)
    if origin in _MAPPINGS:
        return _mapping(value, annotation, where, builds)
    return {bool: _bool, int: _int, float: _float, str: _str, Path: _path}[annotation](value, where)


def described(annotation: Any) -> str:
    """Return a type in a reader's words."""
    origin = get_origin(annotation) or annotation
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", type(None): "null"}
    if origin in (Union, types.UnionType):
        return " or ".join(described(option) for option in get_args(annotation))
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if origin in _LISTS:
        return "a list"
    if origin in _MAPPINGS:
        return "keys with values"
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def takes_text(annotation: Any) -> bool:
    """Say whether a declared type is text, or text or null: then a bare word is that word, whatever it looks like."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return str in options and all(option in (str, type(None)) for option in options)


def _is_simple(annotation: Any) -> bool:
    origin = get_origin(annotation) or annotation
    return origin in (bool, int, float, str, Path, Literal, *_LISTS, *_MAPPINGS)


def _wrong(value: Any, expected: str, where: str, hint: str = "") -> ConfigError:
    shown = "null" if value is None else repr(value)
    if isinstance(value, str) and value.lower() in ("none", "null"):
        hint = hint or "; write null for none"
    return ConfigError(f"{where}={shown}: expected {expected}{hint}")


def _one_of(value: Any, options: tuple[Any, ...], where: str, builds: bool) -> Any:
    if value is None and type(None) in options:
        return None
    others = [option for option in options if option is not type(None)]
    simple = sorted((o for o in others if _is_simple(o)), key=lambda o: o is not type(value))
    error: ConfigError | None = None
    for option in simple:
        try:
            return coerce(value, option, where, builds=builds)
        except ConfigError as failed:
            error = error or failed
    rest = [option for option in others if option not in simple]
    if rest and not (simple and isinstance(value, (str, int, float, type(None)))):
        return coerce(value, rest[0], where, builds=builds)
    if error is None or len(simple) > 1 or value is None:
        raise _wrong(value, " or ".join(map(described, options)), where)
    raise error


def _literal(value: Any, allowed: tuple[Any, ...], where: str) -> Any:
    for option in allowed:
        if value == option and type(value) is type(option):
            return option
    for option in allowed:
        if isinstance(option, bool) or isinstance(value, bool) != isinstance(option, bool):
            continue
        if isinstance(option, int):
            try:
                if _int(value, where) == option:
                    return option
            except ConfigError:
                continue
        elif str(value) == str(option):
            return option
    shown = "null" if value is None else repr(value)
    raise ConfigError(f"{where}={shown}: one of {', '.join(map(str, allowed))}{_close(str(value), [str(a) for a in allowed])}")


def _close(name: str, known: list[str]) -> str:
    hint = nearest(name, known)
    return hint if "did you mean" in hint else ""


def _list(value: Any, annotation: Any, where: str, builds: bool) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        hint = f"; write {where}=[{value}]" if isinstance(value, (str, int, float)) and str(value) else ""
        raise _wrong(value, "a list", where, hint)
    inner = get_args(annotation)
    if get_origin(annotation) is tuple and inner and inner[-1] is not Ellipsis:
        if len(inner) != len(value):
            raise _wrong(value, f"a list of {len(inner)}", where)
        kinds = list(inner)
    else:
        kinds = [inner[0] if inner else Any] * len(value)
    return [coerce(item, kind, f"{where}[{i}]", builds=builds) for i, (item, kind) in enumerate(zip(value, kinds))]


def _mapping(value: Any, annotation: Any, where: str, builds: bool) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(value, "keys with values", where)
    keys, values = get_args(annotation) or (Any, Any)
    return {coerce(k, keys, where): coerce(v, values, f"{where}.{k}", builds=builds) for k, v in value.items()}


def _as_object(value: Any, annotation: Any, where: str) -> Any:
    """Return a value for a type that is not a plain one: an object passes, a name becomes the callable or member that it names."""
    if isinstance(value, str):
        if get_origin(annotation) is collections.abc.Callable or annotation is collections.abc.Callable:
            return resolve(value, where)
        if inspect.isclass(annotation) and issubclass(annotation, enum.Enum) and not issubclass(annotation, str):
            if value not in annotation.__members__:
                raise _wrong(value, f"one of {', '.join(annotation.__members__)}", where)
            return annotation[value]
    return value


def _bool(value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise _wrong(value, "true or false", where)


def _float(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _wrong(value, "a number", where)
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise _wrong(value, "a number", where) from None


def _int(value: Any, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        for base in (10, 0):
            try:
                return int(value, base)
            except ValueError:
                continue
        try:
            value = float(value)
        except ValueError:
            raise _wrong(value, "a whole number", where) from None
    if not isinstance(value, float):
        raise _wrong(value, "a whole number", where)
    if not value.is_integer():  # false for infinities and for what is no number
        near = f"; nearest {round(value)}" if abs(value) < 1e300 else ""
        raise _wrong(value, "a whole number", where, near)
    return int(value)


def _str(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    # The file's reader has already made a number or a truth value of it, and its spelling is lost.
    raise _wrong(value, "text", where, "; put it in quotes")


def _path(value: Any, where: str) -> str:
    return str(value) if isinstance(value, Path) else _str(value, where)
