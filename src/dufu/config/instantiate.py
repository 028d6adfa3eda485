"""Build what a recorded call describes, resolving names only inside trusted packages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from dufu.config.configurable import reads_cfg_itself, takes_cfg
from dufu.config.lazy import clear_errors
from dufu.config.resolve import resolve
from dufu.config.trusted import is_trusted, trust
from dufu.errors import ConfigError, DufuError

__all__ = ["instantiate", "is_trusted", "resolve", "trust"]


def instantiate(cfg: Any, /, **override: Any) -> Any:
    """Build a recorded call, its arguments first; anything else is returned as it is.

    Args:
        cfg: a recorded call, a list of them, or a plain value. A call with `_recursive_: false` gets its arguments unbuilt. The
            target may itself be a recorded call that yields a callable.
        override: arguments that replace the recorded ones.

    Raises:
        ConfigError: the target cannot be resolved or does not take these arguments; the message names the target.
    """
    if isinstance(cfg, DictConfig) and is_dataclass(OmegaConf.get_type(cfg)):
        return OmegaConf.to_object(cfg)
    if isinstance(cfg, ListConfig):
        return _list(cfg)
    if isinstance(cfg, list):
        return [instantiate(item) for item in cfg]
    if not isinstance(cfg, (DictConfig, Mapping)) or "_target_" not in cfg:
        if override:
            raise ConfigError(f"arguments {', '.join(override)} for something that is not a recorded call: {cfg!r}")
        return cfg
    with clear_errors():
        items = {key: cfg[key] for key in cfg}
    recursive = items.pop("_recursive_", True)
    target = instantiate(items.pop("_target_"))
    items.update(override)
    arguments = {key: instantiate(value) for key, value in items.items()} if recursive else items
    function = resolve(target)
    name = target if isinstance(target, str) else getattr(target, "__qualname__", repr(target))
    if takes_cfg(function) and not reads_cfg_itself(function) and isinstance(arguments.get("cfg"), (DictConfig, Mapping)):
        cfg = arguments.pop("cfg")  # its keys are the arguments, so recorded calls among them are built as well
        with clear_errors():
            given = {key: cfg[key] for key in cfg}
        arguments = {**{key: _plain(instantiate(value) if recursive else value) for key, value in given.items()}, **arguments}
    _bind(function, name, arguments)
    try:
        return function(**arguments)
    except DufuError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    except TypeError as error:
        raise TypeError(f"while building {name}: {error}") from error
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"while building {name}")
        raise


def _bind(function: Any, name: str, arguments: dict[str, Any]) -> None:
    """Raise ConfigError when a callable does not take these arguments."""
    if takes_cfg(function) and "cfg" in arguments:
        return  # what it holds is for the target's own from_config to read
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a builtin without a signature
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}") from error


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, (DictConfig, ListConfig)) else value


def _list(cfg: ListConfig) -> Any:
    """Build each item. The result is a ListConfig again unless that would turn a built item into another object."""
    with clear_errors():
        built = [instantiate(item) for item in cfg]
    wrapped = OmegaConf.create(built, flags={"allow_objects": True})
    same = all(a is b or isinstance(b, (DictConfig, ListConfig, int, float, str, bytes)) for a, b in zip(wrapped, built))
    return wrapped if same else built
