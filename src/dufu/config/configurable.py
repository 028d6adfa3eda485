"""`configurable`: let an `__init__` take its arguments one by one or as a single `cfg`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf


def configurable(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate `__init__` so that `Class(cfg, **overrides)` and `Class(a=…, b=…)` both work.

    With `cfg`, the class's `from_config(cfg)` names the arguments; without that method the keys of `cfg` are the arguments.
    Explicit keyword arguments override the config's.
    """

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        cfg = kwargs.pop("cfg") if "cfg" in kwargs else None
        if cfg is None and args and isinstance(args[0], (DictConfig, Mapping)):
            cfg, args = args[0], args[1:]
        if cfg is None:
            init(self, *args, **kwargs)
            return
        maker = getattr(type(self), "from_config", None)
        given = maker(cfg) if maker is not None else cfg
        if isinstance(given, DictConfig):
            given = OmegaConf.to_container(given, resolve=True)
        init(self, *args, **{**dict(given), **kwargs})

    wrapped.__dufu_configurable__ = True  # type: ignore[attr-defined]
    return wrapped


def takes_cfg(target: Any) -> bool:
    """Say whether a class's `__init__` is `configurable`, so that `cfg` holds its arguments."""
    return inspect.isclass(target) and hasattr(target.__init__, "__dufu_configurable__")
