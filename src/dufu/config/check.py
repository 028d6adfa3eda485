"""The strict check: every key is known, every value has its declared type, no two places disagree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf, SCMode

from dufu.config.coerce import coerce
from dufu.config.declared import RESERVED, UnknownKey
from dufu.config.lazy import as_config, clear_errors, target_path
from dufu.config.plain import literal
from dufu.config.registry import HOMES, lookup, names
from dufu.config.renamed import FILLED_IN
from dufu.config.resolve import resolve
from dufu.config.schema import CALLS, SECTION_NAMES, SECTIONS
from dufu.config.signature import signature_of
from dufu.errors import ConfigError


def check_config(cfg: Any) -> DictConfig:
    """Return the effective config: checked, typed, defaults filled in.

    Args:
        cfg: what a file and its overrides gave; sections that are absent stay absent.

    Raises:
        ConfigError: the first key that is unknown, misplaced or of the wrong type, with the nearest valid key.
    """
    if isinstance(cfg, DictConfig):
        with clear_errors():
            plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True, structured_config_mode=SCMode.INSTANTIATE)
    else:
        plain = dict(cfg)
    try:
        checked = {str(name): _check_top(str(name), value) for name, value in plain.items()}
    except UnknownKey as error:
        raise ConfigError(error.text(plain)) from None
    config: DictConfig = as_config(literal(checked))
    return config


def _check_top(name: str, value: Any) -> Any:
    if name in SECTIONS:
        return check_section(value, SECTIONS[name], name)
    if name in CALLS:
        return check_call_of(value, CALLS[name], name)
    raise UnknownKey(name, "", SECTION_NAMES)


def check_section(value: Any, cls: type, where: str) -> dict[str, Any]:
    """Return a section with every key present and of its declared type."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}={'null' if value is None else repr(value)}: expected a section with keys")
    hints = get_type_hints(cls)
    known = [item.name for item in fields(cls)]
    for name in value:
        if name not in known:
            raise UnknownKey(str(name), where, known)
    return {
        item.name: _check_key(value.get(item.name, MISSING), item, hints[item.name], f"{where}.{item.name}") for item in fields(cls)
    }


def _check_key(value: Any, item: Field[Any], kind: Any, where: str) -> Any:
    if is_dataclass(kind):
        return check_section({} if value is MISSING else value, kind, where)  # type: ignore[arg-type]
    if value is MISSING:
        value = item.default_factory() if callable(item.default_factory) else item.default
    if "kind" not in item.metadata:
        return coerce(value, kind, where)
    if value is None:
        if item.metadata["nullable"]:
            return None
        raise ConfigError(
            f"{where}=null: name a {item.metadata['kind']}, such as {', '.join(sorted(names(item.metadata['kind']))[:3])}"
        )
    if isinstance(value, list):
        return [check_call_of(inner, item.metadata["kind"], f"{where}[{i}]") for i, inner in enumerate(value)]
    return check_call_of(value, item.metadata["kind"], where)


def check_call_of(value: Any, kind: str, where: str) -> Any:
    """Return the recorded call that stands where something of a registered kind is wanted: given by name, or as a call."""
    if isinstance(value, str):
        value = {"_target_": value}
    if isinstance(value, Mapping) and "_target_" not in value:
        raise ConfigError(f"{where} has keys but no _target_, which names the {kind}; known: {', '.join(sorted(names(kind)))}")
    if not isinstance(value, Mapping):
        if value is None or isinstance(value, (bool, int, float, list)):
            raise ConfigError(f"{where}={value!r}: expected the name of a {kind}; known: {', '.join(sorted(names(kind)))}")
        return value  # an object that a program has put there
    name = value["_target_"]
    if isinstance(name, str) and "." not in name:
        found = lookup(name, kind, f"{where}._target_")
        if sum(name in names(other) for other in HOMES) > 1:  # only this place knows which one is meant
            value = {**value, "_target_": target_path(found)}
    return check_calls(value, where)


def check_arguments(values: Mapping[str, Any], target: Any, where: str) -> dict[str, Any]:
    """Return the arguments of a call, each known to the target and of its annotated type."""
    signature = signature_of(target)
    out = {}
    for name, value in values.items():
        argument = signature.arguments.get(name)
        path = f"{where}.{name}"
        if path in FILLED_IN:
            raise ConfigError(f"{path}: dufu fills it in itself; remove the key")
        if argument is None:
            if not signature.open:
                raise UnknownKey(str(name), where, list(signature.arguments))
        elif argument.annotation is not Any:
            value = coerce(value, argument.accepted, path, builds=True)
        elif not argument.written and isinstance(value, str) and type(argument.default) in (int, float):
            value = _as_number(value)
        out[name] = check_calls(value, path)
    return out


def _as_number(value: str) -> Any:
    """Return text as a number for an argument without a type whose default is one; text that is no number stays."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def check_calls(value: Any, where: str) -> Any:
    """Check every recorded call inside `value` against the signature of what it calls."""
    if isinstance(value, (list, tuple)):
        return [check_calls(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if "_target_" not in value:
        return {k: check_calls(v, f"{where}.{k}") for k, v in value.items()}
    own = {k: v for k, v in value.items() if k in RESERVED}
    arguments = {k: v for k, v in value.items() if k not in RESERVED}
    if "_recursive_" in own:
        own["_recursive_"] = coerce(own["_recursive_"], bool, f"{where}._recursive_")
    if isinstance(own["_target_"], Mapping):  # a call that yields the callable: what that accepts is known once it is made
        own["_target_"] = check_calls(own["_target_"], f"{where}._target_")
        return {**own, **{k: check_calls(v, f"{where}.{k}") for k, v in arguments.items()}}
    function = resolve(own["_target_"], f"{where}._target_")
    signature = signature_of(function)
    if not signature.cfg or arguments.get("cfg") is None:
        return {**own, **check_arguments({k: v for k, v in arguments.items() if not signature.cfg or k != "cfg"}, function, where)}
    cfg = coerce(arguments.pop("cfg"), dict, f"{where}.cfg")
    inner = check_calls(cfg, f"{where}.cfg") if signature.free_cfg else check_arguments(cfg, function, f"{where}.cfg")
    return {**own, **check_arguments(arguments, function, where), "cfg": inner}
