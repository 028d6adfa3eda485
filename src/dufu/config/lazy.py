"""`LazyCall`: a call that is recorded as data and made later by `instantiate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dufu.config.trusted import hold
from dufu.errors import ConfigError, nearest

Target = Callable[..., Any] | str | Mapping[str, Any]

CONFIG_MODULE = "__dufu_config__"  # the name under which a `.py` config runs


def as_config(value: Any) -> Any:
    """Wrap a mapping so that it may hold any Python object, as recorded calls do."""
    return OmegaConf.create(value, flags={"allow_objects": True})


def one_line(error: OmegaConfBaseException) -> str:
    """Return what an error of the config library means: the key, and the nearest one that exists."""
    message = str(error).splitlines()[0].strip() or type(error).__name__
    path = str(error.full_key or "")
    parent = error.parent_node
    if "Missing key" in message and isinstance(parent, DictConfig):
        above = path.rpartition(".")[0]
        inside = f'"{above}" has' if above else "there is"
        return f'{inside} no key "{error.key}"{nearest(str(error.key), [str(k) for k in parent])}'
    return f"{path}: {message}" if path and path not in message else message


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn an error of the config library, such as an interpolation of a key that does not exist, into a ConfigError of one line."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error


def target_path(target: Any) -> str:
    """Return the shortest importable dotted path of a callable (`dufu.optim.AdamW`, not where it happens to be defined).

    Raises:
        ConfigError: nothing importable leads to it, as with a lambda or a function inside a function.
    """
    if isinstance(target, str):
        return target
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if module == CONFIG_MODULE:
        raise ConfigError(f"{name} is defined in the config file, where a saved run could not find it; move it into a module")
    if module is None or name is None or "<" in name:
        raise ConfigError(f"{target!r} has no importable name; define it at the top level of a module")
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        prefix = ".".join(parts[:length])
        found: Any = import_module(prefix)
        for step in name.split("."):
            found = getattr(found, step, None)
        if found is target or (found is not None and found == target):
            return f"{prefix}.{name}"
    raise ConfigError(f"{target!r} is not what {module}.{name} names; record the name that a config can import")


class LazyCall:
    """Record a call without making it.

    `LazyCall(f)(a=1)` is a `DictConfig` with `_target_` and the arguments, to be changed, saved and built later. A callable given
    as such is trusted, since the program holds it already; a name given as text must be one that configs may use.

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
        target = self._target
        if callable(target):
            target = target_path(target)
            hold(target)
        config: DictConfig = as_config({"_target_": target, **kwargs})
        return config
