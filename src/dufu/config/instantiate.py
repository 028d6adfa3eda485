"""Build what a recorded call describes, resolving names only inside trusted packages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from dufu.config.configurable import takes_cfg
from dufu.config.registry import lookup
from dufu.errors import ConfigError, DufuError

# Packages whose callables a config may name. `torch` as a whole is not among them: torch.load and torch.hub run code.
_TRUSTED = ["dufu", "torch.nn", "torch.optim"]


def trust(package: str) -> None:
    """Let configs name callables of `package` (`--trust PACKAGE` on the command line)."""
    if package not in _TRUSTED:
        _TRUSTED.append(package)


def is_trusted(path: str) -> bool:
    """Say whether a dotted path lies in a trusted package."""
    return any(path == package or path.startswith(package + ".") for package in _TRUSTED)


def resolve(target: Any, where: str = "_target_") -> Any:
    """Return the callable that a short name or a dotted path names.

    Raises:
        ConfigError: the path lies outside the trusted packages, or nothing importable has that name.
    """
    if not isinstance(target, str):
        return target
    if "." not in target:
        return lookup(target)
    if not is_trusted(target):
        raise ConfigError(
            f'{where}: "{target}" lies outside the trusted packages ({", ".join(_TRUSTED)}); '
            f"if you trust it, add --trust {target.split('.')[0]}"
        )
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
                continue
            raise
        for name in parts[length:]:
            # An attribute that is itself another module would lead out of the trusted package (`torch.nn.os.system`).
            found = getattr(found, name, None)
            if found is None or inspect.ismodule(found):
                raise ConfigError(f'{where}: nothing importable is called "{target}"')
        if not is_trusted(getattr(found, "__module__", None) or target):
            raise ConfigError(f'{where}: "{target}" is {found.__module__}.{found.__qualname__}, which is not trusted')
        return found
    raise ConfigError(f'{where}: nothing importable is called "{target}"')


def instantiate(cfg: Any, /, **override: Any) -> Any:
    """Build a recorded call, its arguments first; anything else is returned as it is.

    Args:
        cfg: a recorded call, a list or mapping of them, or a plain value.
        override: arguments that replace the recorded ones.

    Raises:
        ConfigError: the target cannot be resolved or does not take these arguments; the message names the target.
    """
    if isinstance(cfg, ListConfig):
        built = [instantiate(item) for item in cfg]
        return OmegaConf.create(built, flags={"allow_objects": True})
    if isinstance(cfg, list):
        return [instantiate(item) for item in cfg]
    if not isinstance(cfg, (DictConfig, Mapping)) or "_target_" not in cfg:
        return cfg
    items = {key: cfg[key] for key in cfg}
    recursive = items.pop("_recursive_", True)
    target = items.pop("_target_")
    arguments = {**items, **override}
    if recursive:
        target = instantiate(target)
        arguments = {key: instantiate(value) for key, value in arguments.items()}
    function = resolve(target)
    if not callable(function):
        raise ConfigError(f"_target_: {target!r} is not callable")
    try:
        if not (takes_cfg(function) and "cfg" in arguments):
            inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{target}: {error}") from error
    except ValueError:
        pass  # a builtin without a signature
    try:
        return function(**arguments)
    except DufuError:
        raise
    except TypeError as error:
        raise TypeError(f"while building {target}: {error}") from error
