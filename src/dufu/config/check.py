"""The strict check: every key is known, every value has its declared type, no two places disagree."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf

from dufu.config.configurable import takes_cfg
from dufu.config.instantiate import resolve
from dufu.config.lazy import as_config
from dufu.config.overrides import parameters
from dufu.config.schema import REPLACED, SECTIONS
from dufu.errors import ConfigError, nearest

_TRUE, _FALSE = {"true", "on", "yes"}, {"false", "off", "no"}


def coerce(value: Any, annotation: Any, where: str) -> Any:
    """Return `value` as the annotated type where nothing is lost (`"1e-4"` for a float, `1e3` for an int).

    Raises:
        ConfigError: it is of another type; the message names the key, the value and the type.
    """
    if annotation is Any or (annotation is None and value is None) or (isinstance(value, Mapping) and "_target_" in value):
        return value
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        options = get_args(annotation)
        if value is None and type(None) in options:
            return None
        errors = []
        for option in sorted(options, key=lambda o: 0 if isinstance(o, type) and type(value) is o else 1):
            if option is type(None):
                continue
            try:
                return coerce(value, option, where)
            except ConfigError as error:
                errors.append(error)
        raise errors[0]
    if origin is Literal:
        allowed = get_args(annotation)
        for option in allowed:
            if (value == option and type(value) is type(option)) or str(value) == str(option):
                return option
        raise ConfigError(f"{where}={value!r}: one of {', '.join(map(str, allowed))}{nearest(str(value), map(str, allowed))}")
    if origin in (list, tuple, typing.Sequence) or annotation in (list, tuple):
        if not isinstance(value, (list, tuple, ListConfig)):
            raise ConfigError(f"{where}={value!r}: expected a list")
        inner = [a for a in get_args(annotation) if a is not Ellipsis]
        kinds = inner if origin is tuple and len(inner) == len(value) else [inner[0] if inner else Any] * len(value)
        items = [coerce(v, kind, f"{where}[{i}]") for i, (v, kind) in enumerate(zip(value, kinds))]
        return items
    if annotation is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
        raise ConfigError(f"{where}={value!r}: expected true or false")
    if annotation in (int, float):
        number = value
        if isinstance(value, str):
            try:
                number = float(value) if annotation is float else int(value.replace("_", ""))
            except ValueError:
                try:
                    number = float(value)
                except ValueError:
                    raise ConfigError(f"{where}={value!r}: expected a number") from None
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ConfigError(f"{where}={value!r}: expected a number")
        if annotation is float:
            return float(number)
        if isinstance(number, float) and not number.is_integer():
            raise ConfigError(f"{where}={value!r}: expected a whole number; nearest {round(number)}")
        return int(number)
    if annotation is str:
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        raise ConfigError(f"{where}={value!r}: expected text")
    return value


def _elsewhere(name: str, section: str) -> str:
    """Say where a key of that name does exist."""
    for other, cls in SECTIONS.items():
        for path in _paths(cls, other):
            if path.split(".")[-1] == name and path != f"{section}.{name}":
                return f'; "{name}" belongs to {path.rsplit(".", 1)[0]}'
    return ""


def _paths(cls: type, prefix: str) -> list[str]:
    hints = get_type_hints(cls)
    out = []
    for item in fields(cls):
        path = f"{prefix}.{item.name}"
        out.append(path)
        if is_dataclass(hints[item.name]):
            out += _paths(hints[item.name], path)
    return out


def _unknown(name: str, where: str, known: list[str]) -> ConfigError:
    path = f"{where}.{name}"
    if path in REPLACED:
        return ConfigError(f"{path}: {REPLACED[path]}")
    hint = nearest(name.replace("-", "_"), known)
    place = _elsewhere(name, where)
    return ConfigError(f'{where} has no key "{name}"{place or hint}')


def check_section(value: Any, cls: type, where: str) -> dict[str, Any]:
    """Return a section with every key present and of its declared type."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}={value!r}: expected a section with keys")
    hints = get_type_hints(cls)
    known = [item.name for item in fields(cls)]
    for name in value:
        if name not in known:
            raise _unknown(str(name), where, known)
    out: dict[str, Any] = {}
    for item in fields(cls):
        kind, path = hints[item.name], f"{where}.{item.name}"
        if is_dataclass(kind):
            out[item.name] = check_section(value.get(item.name, {}), kind, path)  # type: ignore[arg-type]
        elif item.name in value:
            out[item.name] = check_calls(coerce(value[item.name], kind, path), path)
        else:
            out[item.name] = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc,operator]
    return out


def check_arguments(values: Mapping[str, Any], target: Any, where: str) -> dict[str, Any]:
    """Return the arguments of a call, each known to the target and of its annotated type."""
    accepted = parameters(target)
    function: Any = vars(target).get("__init__", target) if isinstance(target, type) else target
    try:
        hints = get_type_hints(getattr(function, "__wrapped__", function))
    except (NameError, TypeError, AttributeError):
        hints = {}
    out = {}
    for name, value in values.items():
        if accepted is not None and name not in accepted:
            raise _unknown(str(name), where, list(accepted))
        out[name] = check_calls(coerce(value, hints.get(name, Any), f"{where}.{name}"), f"{where}.{name}")
    return out


def check_calls(value: Any, where: str) -> Any:
    """Check every recorded call inside `value` against the signature of what it calls."""
    if isinstance(value, (list, tuple)):
        return [check_calls(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if "_target_" not in value:
        return {k: check_calls(v, f"{where}.{k}") for k, v in value.items()}
    own = {k: v for k, v in value.items() if k in ("_target_", "_recursive_")}
    target = value["_target_"]
    if isinstance(target, Mapping):
        return dict(value)
    function = resolve(target, f"{where}._target_")
    arguments = {k: v for k, v in value.items() if k not in own}
    if takes_cfg(function) and isinstance(arguments.get("cfg"), Mapping) and not hasattr(function, "from_config"):
        rest = {k: v for k, v in arguments.items() if k != "cfg"}
        inner = check_arguments(arguments["cfg"], function, f"{where}.cfg")
        return {**own, **check_arguments(rest, function, where), "cfg": inner}
    return {**own, **check_arguments(arguments, function, where)}


def check_config(cfg: Any) -> DictConfig:
    """Return the effective config: checked, typed, defaults filled in.

    Args:
        cfg: what a file and its overrides gave; sections that are absent stay absent.

    Raises:
        ConfigError: the first key that is unknown, misplaced or of the wrong type, with the nearest valid key.
    """
    plain = OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else dict(cfg)
    known = [*SECTIONS, "model", "optim"]
    out: dict[str, Any] = {}
    assert isinstance(plain, dict)
    for name, value in plain.items():
        if name not in known:
            raise ConfigError(f'the config has no section "{name!s}"{nearest(str(name), known)}')
        if name in SECTIONS:
            out[str(name)] = check_section(value, SECTIONS[str(name)], str(name))
        elif isinstance(value, str):
            out[str(name)] = check_calls({"_target_": value}, str(name))
        else:
            out[str(name)] = check_calls(value, str(name))
    config: DictConfig = as_config(out)
    return config
