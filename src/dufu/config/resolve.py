"""From the name that a config gives to the callable it means."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from dufu.config.registry import is_registered, lookup, names
from dufu.config.renamed import TARGETS
from dufu.config.trusted import is_compiled, is_held, is_trusted, trusted_packages
from dufu.errors import ConfigError, nearest


def resolve(target: Any, where: str = "_target_") -> Any:
    """Return the callable that a short name or a dotted path names.

    Args:
        target: a registered short name, a dotted path, or a callable, which is returned as it is.
        where: the key that holds it, for messages.

    Raises:
        ConfigError: the path lies outside what configs may name, or nothing importable has that name. Nothing outside is imported.
    """
    if not isinstance(target, str):
        if not callable(target):
            raise ConfigError(f"{where}: {target!r} is not callable")
        return target
    if "." not in target:
        return lookup(target, where=where)
    own = target.startswith("dufu.")
    if not (is_trusted(target) or is_held(target) or own):
        raise _refusal(target, where)
    if any(part.startswith("_") for part in target.split(".")) and not is_held(target):
        raise ConfigError(f'{where}: "{target}" is private; a config names public callables only')
    found = _find(target, where)
    if not callable(found):
        raise ConfigError(f'{where}: "{target}" is a {type(found).__name__}, which cannot be called')
    if is_held(target) or is_registered(found):
        return found
    home = getattr(found, "__module__", None)
    if own and not is_trusted(target):
        raise ConfigError(
            f'{where}: "{target}" is not something a config may build; in dufu those are registered names '
            f"(`dufu show` lists them) and what lies in {', '.join(p for p in trusted_packages() if p.startswith('dufu.'))}"
        )
    # What a trusted module has merely imported from elsewhere (`from os import system`) is not its own.
    if not (isinstance(home, str) and (is_trusted(home) or is_compiled(home))):
        raise ConfigError(f'{where}: "{target}" is {home}.{getattr(found, "__qualname__", "?")}, which is not trusted')
    return found


def _find(target: str, where: str) -> Any:
    """Import the longest part of a path that is a module and take the rest as attributes."""
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
            inner = getattr(found, name, None)
            # A module among the attributes leads out of the package (`torch.nn.os.system`).
            if inner is None or inspect.ismodule(inner):
                hint = nearest(name, [n for n in getattr(found, "__all__", [])])
                raise ConfigError(f'{where}: nothing importable is called "{target}"{hint}')
            found = inner
        return found
    raise ConfigError(f'{where}: nothing importable is called "{target}"; its package must be installed or on PYTHONPATH')


def _refusal(target: str, where: str) -> ConfigError:
    package, last = target.split(".")[0], target.split(".")[-1]
    if package in ("libai", "oneflow", "projects"):
        if last in TARGETS:
            return ConfigError(f'{where}: "{target}" is {TARGETS[last]} here (docs/libai.md)')
        return ConfigError(f'{where}: "{target}" does not exist here; `dufu show` lists what does (docs/libai.md)')
    if package == "__main__":
        return ConfigError(f'{where}: "{target}" was defined in a script; run that script, or move it into a module')
    known = [name for kind in ("model", "optimizer", "schedule") for name in names(kind)] if last.islower() else []
    close = nearest(last, known) if known else ""
    return ConfigError(
        f'{where}: "{target}" lies outside the packages that a config may name ({", ".join(trusted_packages())}); '
        f"if you trust it, add --trust {package}{close if 'did you mean' in close else ''}"
    )
