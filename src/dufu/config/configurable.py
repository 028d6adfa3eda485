"""`configurable`: let an `__init__`, or a function, take its arguments one by one or as a single `cfg`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from omegaconf import DictConfig, OmegaConf

F = TypeVar("F", bound=Callable[..., Any])
FromConfig = Callable[..., Mapping[str, Any]]

_MARK = "__dufu_configurable__"


@overload
def configurable(init: F) -> F: ...
@overload
def configurable(*, from_config: FromConfig) -> Callable[[F], F]: ...
def configurable(init: F | None = None, *, from_config: FromConfig | None = None) -> Any:
    """Decorate `__init__` so that `Class(cfg, **overrides)` and `Class(a=…, b=…)` both work; with `from_config`, also a function.

    With `cfg`, the class's `from_config(cfg)` (or the function given here) names the arguments; without either the keys of `cfg` are the
    arguments. `from_config` may have further parameters of its own, which then go to it; every other argument overrides the config's.

    Raises:
        TypeError: `from_config` is no function whose first parameter is called cfg.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            method = args[:1] if function.__name__ == "__init__" else ()
            cfg, rest, kwargs = _split(args[len(method) :], kwargs)
            if cfg is None:
                return function(*method, *rest, **kwargs)
            maker = from_config or (getattr(type(method[0]), "from_config", None) if method else None)
            return function(*method, **_arguments(maker, cfg, rest, kwargs))

        setattr(wrapped, _MARK, from_config or True)
        return wrapped  # type: ignore[return-value]

    if from_config is not None:
        _check(from_config)
    return decorate if init is None else decorate(init)


def takes_cfg(target: Any) -> bool:
    """Say whether a class or a function is `configurable`, so that `cfg` holds its arguments."""
    return hasattr(target.__init__ if inspect.isclass(target) else target, _MARK)


def reads_cfg_itself(target: Any) -> bool:
    """Say whether what `cfg` holds is the target's own affair, because a `from_config` reads it."""
    if not takes_cfg(target):
        return False
    if inspect.isclass(target):
        return hasattr(target, "from_config") or callable(getattr(target.__init__, _MARK))
    return callable(getattr(target, _MARK))


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return (cfg or None, other positional arguments, other keyword arguments)."""
    if "cfg" in kwargs:
        return kwargs["cfg"], args, {k: v for k, v in kwargs.items() if k != "cfg"}
    if args and isinstance(args[0], (DictConfig, Mapping)):
        return args[0], args[1:], kwargs
    return None, args, kwargs


def _arguments(maker: FromConfig | None, cfg: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if maker is None:
        if rest:
            raise TypeError("beside a cfg, arguments are given by name")
        given: Any = cfg
    else:
        _check(maker)
        parameters = inspect.signature(maker).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        own = {k: v for k, v in kwargs.items() if takes_all or k in named}
        kwargs = {k: v for k, v in kwargs.items() if k not in own}
        given = maker(cfg, *rest, **own)
    if isinstance(given, DictConfig):
        given = OmegaConf.to_container(given, resolve=True)
    return {**dict(given), **kwargs}


def _check(maker: Any) -> None:
    names = list(inspect.signature(maker).parameters) if callable(maker) else []
    if names[:1] != ["cfg"]:
        raise TypeError(f"from_config must be a classmethod or a function whose first parameter is cfg, not {maker!r}")
