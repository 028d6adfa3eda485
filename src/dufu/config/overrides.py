"""`key=value` overrides in Hydra's grammar; a key that nothing knows is an error."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig

from dufu.config.configurable import takes_cfg
from dufu.config.instantiate import resolve
from dufu.errors import ConfigError, nearest


def parameters(target: Any) -> dict[str, inspect.Parameter] | None:
    """Return the named parameters of a callable, or None when it takes any keyword or has no signature."""
    try:
        found = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values()):
        return None
    return {name: p for name, p in found.items() if name != "self"}


def known_keys(node: Any, holder: Any = None, key_in_holder: str = "") -> list[str] | None:
    """Return the keys that a node may hold, or None when any will do.

    A recorded call may hold its target's parameters; the `cfg` of a configurable class may hold the class's.
    """
    if isinstance(node, DictConfig) and "_target_" in node:
        found = parameters(resolve(node["_target_"]))
        return None if found is None else [*found, "cfg", "_target_", "_recursive_"]
    if key_in_holder == "cfg" and isinstance(holder, DictConfig) and "_target_" in holder:
        target = resolve(holder["_target_"])
        if takes_cfg(target):
            found = parameters(target)
            return None if found is None else list(found)
    return [str(k) for k in node] if isinstance(node, DictConfig) else None


def parse(text: str) -> tuple[str, Any, bool]:
    """Return (key, value, force_new) of one override; `+key=value` forces a new key.

    Raises:
        ConfigError: the text is not an override.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f'override "{text}": {reason}; write key=value, quoting a value with special characters') from error
    if override.is_delete():
        raise ConfigError(f'override "{text}": deleting a key is not supported; set it to null')
    if override.is_sweep_override():
        raise ConfigError(f'override "{text}": several values (a sweep) are not supported; quote the value')
    return override.key_or_group, override.value(), override.is_add() or override.is_force_add()


def apply_overrides(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Set dotted keys of `cfg` in place and return it.

    Args:
        cfg: the config.
        overrides: texts such as `train.seed=3`; a key given twice takes the last value; `+a.b=1` makes a new key.

    Raises:
        ConfigError: a key that does not exist and that no signature knows, or a key below a plain value.
    """
    for text in overrides:
        key, value, force = parse(text)
        node: Any = cfg
        holder: Any = None
        name_in_holder = ""
        parts = key.split(".")
        for depth, part in enumerate(parts):
            last = depth == len(parts) - 1
            if isinstance(node, ListConfig):
                if not part.isdigit() or int(part) >= len(node):
                    raise ConfigError(f'override "{text}": {".".join(parts[:depth])} is a list of {len(node)}; use an index')
                step: Any = int(part)
                exists = True
            elif isinstance(node, DictConfig):
                step = part
                exists = part in node
            else:
                raise ConfigError(f'override "{text}": {".".join(parts[:depth])} is a plain value and holds no "{part}"')
            if not exists and not force:
                allowed = known_keys(node, holder, name_in_holder)
                if allowed is not None and part not in allowed:
                    where = ".".join(parts[:depth]) or "the config"
                    raise ConfigError(f'override "{text}": {where} has no key "{part}"{nearest(part, allowed)}')
            if last:
                node[step] = value
            else:
                if not exists or node[step] is None:
                    node[step] = {}
                holder, name_in_holder, node = node, part, node[step]
    return cfg
