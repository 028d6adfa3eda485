"""Configs as plain data: what YAML can hold."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, SCMode

from dufu.config.lazy import clear_errors, target_path
from dufu.errors import ConfigError

_INTERPOLATION = re.compile(r"(\\*)\$\{")


def literal(value: Any) -> Any:
    """Return plain data whose texts mean themselves: a `${` in a text that has been resolved is no interpolation."""
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda m: m[1] * 2 + "\\${", value)
    if isinstance(value, dict):
        return {k: literal(v) for k, v in value.items()}
    return [literal(v) for v in value] if isinstance(value, list) else value


def plain(cfg: Any) -> Any:
    """Return a config as dicts, lists and scalars; callables as their shortest dotted path, dataclasses as recorded calls.

    Raises:
        ConfigError: a value that has no such form, with its key; an interpolation that leads nowhere.
    """
    if isinstance(cfg, (DictConfig, ListConfig)):
        with clear_errors():
            cfg = OmegaConf.to_container(cfg, resolve=True, structured_config_mode=SCMode.INSTANTIATE)
    return _plain(cfg, "")


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v, f"{where}.{k}" if where else str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        kept = {item.name: getattr(value, item.name) for item in fields(value) if item.init}
        return _plain({"_target_": target_path(type(value)), **kept}, where)
    if inspect.isroutine(value) or inspect.isclass(value):
        return target_path(value)
    raise ConfigError(f"{where}: a {type(value).__name__} cannot be written to YAML; wrap its construction in LazyCall")
