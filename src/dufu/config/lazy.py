"""`LazyCall`: a call that is recorded as data and made later by `instantiate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dufu.errors import ConfigError

Target = Callable[..., Any] | str | Mapping[str, Any]


def as_config(value: Any) -> Any:
    """Wrap a mapping so that it may hold any Python object, as recorded calls do."""
    return OmegaConf.create(value, flags={"allow_objects": True})


def target_path(target: Any) -> str:
    """Return the shortest importable dotted path of a callable (`dufu.optim.AdamW`, not where it happens to be defined)."""
    if isinstance(target, str):
        return target
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if module is None or name is None or "<" in name:
        raise ConfigError(f"{target!r} has no importable name; define it at the top level of a module")
    from importlib import import_module

    parts = module.split(".")
    for length in range(1, len(parts)):
        prefix = ".".join(parts[:length])
        found: Any = import_module(prefix)
        for step in name.split("."):
            found = getattr(found, step, None)
        if found is target:
            return f"{prefix}.{name}"
    return f"{module}.{name}"


class LazyCall:
    """Record a call without making it.

    `LazyCall(f)(a=1)` is a `DictConfig` with `_target_` and the arguments, to be changed, saved and built later.

    Args:
        target: a callable, a dotted path, a registered short name, or another recorded call that yields a callable.
    """

    def __init__(self, target: Target) -> None:
        if not (callable(target) or isinstance(target, (str, Mapping, DictConfig))):
            raise TypeError(f"LazyCall needs a callable, a name or a recorded call, not {target!r}")
        self._target = target

    def __call__(self, *args: Any, **kwargs: Any) -> DictConfig:
        if args:
            raise TypeError("LazyCall takes keyword arguments only, so that every value in a config has a name")
        target = self._target if isinstance(self._target, (Mapping, DictConfig)) else target_path(self._target)
        if isinstance(target, str) and target.startswith("__main__."):
            target = self._target  # type: ignore[assignment]
        config: DictConfig = as_config({"_target_": target, **kwargs})
        return config
