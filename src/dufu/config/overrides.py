"""`key=value` overrides in Hydra's grammar; the declared type of the key wins, and a key that nothing knows is an error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig

from dufu.config.coerce import takes_text
from dufu.config.declared import UnknownKey, place_at
from dufu.config.lazy import as_config, clear_errors
from dufu.config.renamed import replacement
from dufu.errors import ConfigError

_KEY = re.compile(r"(\+{0,2}|~)([^\s=+~.\[\]{}'\"]+(?:\.[^\s=.\[\]{}'\"]+)*)")


def parse(text: str) -> tuple[str, str, bool]:
    """Return (key, written value, force_new) of one override; `+key=value` forces a new key.

    Raises:
        ConfigError: the text is not an override.
    """
    key, equals, written = text.partition("=")
    match = _KEY.fullmatch(key.strip())
    if not equals or not match:
        raise ConfigError(f'override "{text}": write key=value, such as train.seed=3')
    if match[1] == "~":
        raise ConfigError(f'override "{text}": deleting a key is not supported; set it to null')
    return match[2], written.strip(), bool(match[1])


def value_of(written: str, annotation: Any, text: str) -> Any:
    """Return the value of an override.

    Where the declared type is text, a bare word is that text, whatever it looks like (`007`, `off`, `a=b`, `[a]`); `null` and quotes
    keep their meaning. Everywhere else Hydra's grammar decides, and what it cannot read as a number, list or mapping is text.

    Args:
        written: what stands behind the first `=`.
        annotation: the declared type.
        text: the whole override, for messages.

    Raises:
        ConfigError: a list, mapping or quoted text that does not end, or a sweep over several values.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if takes_text(annotation) and written != "null" and written[:1] not in ("'", '"', "$"):
        return written
    try:
        override = OverridesParser.create().parse_override(f"key={written}")
    except HydraException as error:
        if written[:1] in ("[", "{", "'", '"'):
            raise ConfigError(f'override "{text}": {str(error).splitlines()[0]}; quote a value with special characters') from error
        return written
    if override.is_sweep_override():
        raise ConfigError(f"override \"{text}\": several values; write [{written}] for a list, or '{written}' for text")
    return override.value()


def apply_overrides(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Set dotted keys of `cfg` in place and return it.

    Args:
        cfg: the config.
        overrides: texts such as `train.seed=3`; a key given twice takes the last value; a mapping is laid over the keys that are
            there; `+a.b=1` makes a new key.

    Raises:
        ConfigError: a key that does not exist and that no signature knows, or a key below a plain value.
    """
    for text in overrides:
        key, written, force = parse(text)
        try:
            with clear_errors():
                _apply(cfg, key.split("."), written, force, text)
        except UnknownKey as error:
            raise ConfigError(f'override "{text}": {error.text(cfg)}') from None
    return cfg


def _apply(cfg: DictConfig, parts: list[str], written: str, force: bool, text: str) -> None:
    node: Any = cfg
    for depth, part in enumerate(parts):
        above = ".".join(parts[:depth])
        last = depth == len(parts) - 1
        place = place_at(cfg, parts[:depth])
        if isinstance(node, str) and place.kind:
            node = _as_call(cfg, parts[:depth], node)
        step: Any = part
        if isinstance(node, ListConfig):
            if not part.isdigit() or int(part) >= len(node):
                raise ConfigError(f'override "{text}": {above} is a list of {len(node)}; use an index')
            step = int(part)
        elif not isinstance(node, DictConfig):
            advice = replacement(".".join(parts))
            raise ConfigError(f'override "{text}": {advice or f"{above} is a plain value and holds no {part!r}"}')
        elif part not in node and not force and place.keys is not None and part not in place.keys:
            raise UnknownKey(part, above, [k for k in place.keys if not k.startswith("_")])
        if last:
            annotation = place_at(cfg, parts).annotation
            set_over(node, step, value_of(written, annotation, text))
            return
        if isinstance(node, DictConfig) and (part not in node or node[part] is None):
            node[part] = {}
        node = node[step]


def _as_call(cfg: DictConfig, path: list[str], name: str) -> DictConfig:
    """Turn a short name into the recorded call that it stands for, so that it can take arguments."""
    parent: Any = cfg
    for part in path[:-1]:
        parent = parent[part]
    parent[path[-1]] = as_config({"_target_": name})
    call: DictConfig = parent[path[-1]]
    return call


def set_over(node: DictConfig | ListConfig, key: Any, value: Any) -> None:
    """Put a value at a key. A mapping is laid over the one that is there, key by key; a recorded call replaces it as a whole."""
    held = node[key] if isinstance(node, ListConfig) or key in node else None
    if isinstance(value, (dict, DictConfig)) and isinstance(held, DictConfig) and "_target_" not in value:
        for inner in value:
            set_over(held, inner, value[inner])
    else:
        node[key] = value
