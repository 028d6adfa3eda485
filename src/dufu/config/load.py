"""`LazyConfig`: load a `.py` or `.yaml` config, override it, save it, print it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dufu.config.lazy import as_config
from dufu.config.overrides import apply_overrides
from dufu.config.plain import literal, plain
from dufu.config.python_file import exported, run_file
from dufu.config.python_text import assignments
from dufu.config.yaml_file import read_yaml
from dufu.errors import ConfigError, nearest

SUFFIXES = (".py", ".yaml", ".yml")


def recipes_folder() -> Path:
    """Return the folder of the shipped recipes and config parts."""
    return Path(str(files("dufu") / "recipes"))


def get_config(name: str) -> DictConfig:
    """Return a packaged config part by its relative name, such as `common/train.py`."""
    folder = recipes_folder()
    known = sorted(str(p.relative_to(folder).as_posix()) for p in folder.rglob("*.py"))
    if name not in known:
        raise ConfigError(f'no packaged config is called "{name}"{nearest(name, known)}')
    config: DictConfig = LazyConfig.load(folder / name)
    return config


def try_get_key(cfg: Any, *keys: str, default: Any = None) -> Any:
    """Return the value of the first dotted key that exists in `cfg`."""
    missing = object()
    for key in keys:
        value = OmegaConf.select(cfg, key, default=missing) if isinstance(cfg, DictConfig) else missing
        if value is not missing:
            return value
    return default


class LazyConfig:
    """Load, override, save and print configs; every method is static."""

    apply_overrides = staticmethod(apply_overrides)

    @staticmethod
    def load(path: str | Path, keys: str | Sequence[str] | None = None) -> Any:
        """Load a config file.

        Args:
            path: a `.py` file (run as code) or a `.yaml`/`.yml` file (data alone: nothing in it runs).
            keys: one name, or several, to return instead of the whole.

        Raises:
            ConfigError: the file is missing, has another suffix, an error in it, or lacks a key.
        """
        path = Path(path)
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"{path}: a config file ends in {', '.join(SUFFIXES)}")
        if not path.is_file():
            raise ConfigError(f"{path}: no such config file")
        if path.suffix == ".py":
            values = run_file(path)
            config = as_config(exported(values))
        else:
            config = values = read_yaml(path)
        if keys is None:
            return config
        wanted = (keys,) if isinstance(keys, str) else tuple(keys)
        for key in wanted:
            if key not in values:
                raise ConfigError(f'{path}: no top-level "{key}"{nearest(key, [str(k) for k in config])}')
        found = tuple(as_config(values[key]) if isinstance(values[key], dict) else values[key] for key in wanted)
        return found[0] if isinstance(keys, str) else found

    @staticmethod
    def load_rel(path: str, keys: str | Sequence[str] | None = None) -> Any:
        """Load a config file by a path relative to the caller's file."""
        caller = sys._getframe(1).f_globals.get("__file__")
        if caller is None:
            raise ConfigError(f"{path}: load_rel works in a file only; use LazyConfig.load")
        return LazyConfig.load(Path(caller).parent / path, keys)

    @staticmethod
    def to_yaml(cfg: Any) -> str:
        """Return the config as YAML, callables as their shortest dotted path; what cannot be written is an error."""
        return OmegaConf.to_yaml(as_config(literal(plain(cfg))))

    @staticmethod
    def save(cfg: Any, path: str | Path) -> None:
        """Write the config as YAML that loads to the same config."""
        Path(path).write_text(LazyConfig.to_yaml(cfg), encoding="utf-8")

    @staticmethod
    def to_py(cfg: Any, prefix: str = "cfg.") -> str:
        """Return the config as Python assignments, one a line, keys sorted, recorded calls written as calls."""
        return assignments(plain(cfg), prefix.rstrip("."))
