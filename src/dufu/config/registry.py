"""Short names for classes: `@register_model("gpt2")`, and the same for optimizers, schedules, datasets, criteria, metrics, hooks.

A name is found in the room that defines the kind, or in an installed distribution's entry points (group `dufu.model`, …), which make
its class usable by name without any import: `[project.entry-points."dufu.model"] mine = "my_package.model:MyModel"`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from dufu.config.lazy import target_path
from dufu.errors import ConfigError, nearest

T = TypeVar("T", bound=Callable[..., Any])

# kind -> the module whose import registers dufu's own classes of that kind
HOMES = {
    "model": "dufu.models",
    "optimizer": "dufu.optim",
    "schedule": "dufu.optim",
    "dataset": "dufu.data",
    "criterion": "dufu.layers",
    "metric": "dufu.training.metrics",
    "hook": "dufu.generation.live",
    "adapter": "dufu.models.lora",
}
_NAMES: dict[str, dict[str, Any]] = {kind: {} for kind in HOMES}
# Registered classes and entry points that were loaded, by identity: what a config may name wherever it lies.
_REGISTERED: dict[int, Any] = {}


def register(kind: str, name: str) -> Callable[[T], T]:
    """Return a decorator that registers a class under `name`; a name taken by another class is an error."""

    def decorate(target: T) -> T:
        held = _NAMES[kind].get(name)
        if held is not None and (held.__module__, held.__qualname__) != (target.__module__, target.__qualname__):
            raise ConfigError(f'{kind} "{name}" is already {_path(held)}')
        _NAMES[kind][name] = target
        _REGISTERED[id(target)] = target
        return target

    return decorate


def register_model(name: str) -> Callable[[T], T]:
    """Register a model class under a short name."""
    return register("model", name)


def register_optimizer(name: str) -> Callable[[T], T]:
    """Register an optimizer class under a short name."""
    return register("optimizer", name)


def register_schedule(name: str) -> Callable[[T], T]:
    """Register a learning-rate schedule under a short name."""
    return register("schedule", name)


def register_dataset(name: str) -> Callable[[T], T]:
    """Register a dataset class under a short name."""
    return register("dataset", name)


def register_criterion(name: str) -> Callable[[T], T]:
    """Register a loss under a short name."""
    return register("criterion", name)


def register_metric(name: str) -> Callable[[T], T]:
    """Register an evaluation metric under a short name."""
    return register("metric", name)


def register_hook(name: str) -> Callable[[T], T]:
    """Register a training hook under a short name."""
    return register("hook", name)


def is_registered(target: Any) -> bool:
    """Say whether this very object was registered, or loaded from an entry point, under some name."""
    return _REGISTERED.get(id(target)) is target


def _outside(kind: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of installed distributions by name; the same one seen twice on the path counts once."""
    return _on_path(kind, tuple(sys.path))


@lru_cache
def _on_path(kind: str, path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """Return what `_outside` does; a look at every installed distribution takes milliseconds, and a config asks dozens of times."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=f"dufu.{kind}"):
        points = found.setdefault(point.name, [])
        if point.value not in [held.value for held in points]:
            points.append(point)
    return found


def _path(target: Any) -> str:
    """Return the shortest dotted path of a class, or where it stands when nothing importable leads to it."""
    try:
        return target_path(target)
    except ConfigError:
        return f"{target.__module__}.{target.__qualname__}"


def names(kind: str) -> dict[str, str]:
    """Return every registered name of a kind with the dotted path behind it; no entry point is loaded.

    Raises:
        ConfigError: no kind is called so.
    """
    if kind not in HOMES:
        raise ConfigError(f'no kind of class is called "{kind}"{nearest(kind, HOMES)}')
    import_module(HOMES[kind])
    own = {name: _path(target) for name, target in _NAMES[kind].items()}
    outside = {name: " and ".join(p.value.replace(":", ".") for p in points) for name, points in _outside(kind).items()}
    return {**outside, **own}


def lookup(name: str, kind: str | None = None, where: str = "") -> Any:
    """Return the class registered under a short name.

    Args:
        name: the short name.
        kind: "model", "optimizer", …; None searches all.
        where: the key that holds the name, for messages.

    Raises:
        ConfigError: nothing of that name, or several things; an entry point that cannot be imported.
    """
    place = f"{where}: " if where else ""
    kinds = [kind] if kind else list(HOMES)
    found = [k for k in kinds if name in names(k)]
    if not found:
        known = [n for k in kinds for n in names(k)]
        raise ConfigError(f'{place}no {kind or "class"} is registered as "{name}"{nearest(name, known)}')
    if len(found) > 1:
        raise ConfigError(
            f'{place}"{name}" is the name of {" and ".join(f"a registered {k}" for k in found)}; give the dotted path'
        )
    return _load(name, found[0], place)


def _load(name: str, kind: str, place: str) -> Any:
    points = _outside(kind).get(name, [])
    loaded: list[Any] = []
    for point in points:
        try:
            target = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f'{place}{kind} "{name}" is the entry point {point.value}, which cannot be loaded: {error}'
            ) from error
        _REGISTERED[id(target)] = target
        loaded.append(target)
    own = _NAMES[kind].get(name)
    candidates = [target for target in [own, *loaded] if target is not None]
    if any(target is not candidates[0] for target in candidates):
        paths = " and ".join(map(_path, candidates))
        raise ConfigError(f'{place}{kind} "{name}" is both {paths}; give the dotted path')
    return candidates[0]
