"""Short names for classes: `@register_model("gpt2")`, and the same for optimizers, schedules, datasets, criteria, metrics.

A name is found in the package that defines the kind, or in an installed distribution's entry points (group `dufu.model`, …).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from dufu.errors import ConfigError, nearest

T = TypeVar("T", bound=Callable[..., Any])

# kind -> the package whose import registers dufu's own classes of that kind
HOMES = {
    "model": "dufu.models",
    "optimizer": "dufu.optim",
    "schedule": "dufu.optim",
    "dataset": "dufu.data",
    "criterion": "dufu.layers",
    "metric": "dufu.training",
}
_NAMES: dict[str, dict[str, Any]] = {kind: {} for kind in HOMES}


def register(kind: str, name: str) -> Callable[[T], T]:
    """Return a decorator that registers a class under `name`; a name taken by another class is an error."""

    def decorate(target: T) -> T:
        held = _NAMES[kind].get(name)
        if held is not None and (held.__module__, held.__qualname__) != (target.__module__, target.__qualname__):
            raise ConfigError(f'{kind} "{name}" is already {held.__module__}.{held.__qualname__}')
        _NAMES[kind][name] = target
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


def names(kind: str) -> dict[str, Any]:
    """Return every registered name of a kind with its class (an installed package's entry point not yet loaded)."""
    import_module(HOMES[kind])
    outside = {point.name: point for point in entry_points(group=f"dufu.{kind}")}
    return {**outside, **_NAMES[kind]}


def lookup(name: str, kind: str | None = None) -> Any:
    """Return the class registered under a short name.

    Raises:
        ConfigError: nothing of that name, or several kinds have one and `kind` was not given.
    """
    kinds = [kind] if kind else list(HOMES)
    found = [(k, names(k)[name]) for k in kinds if name in names(k)]
    if not found:
        known = [n for k in kinds for n in names(k)]
        raise ConfigError(f'no {kind or "class"} is registered as "{name}"{nearest(name, known)}')
    if len(found) > 1:
        raise ConfigError(f'"{name}" is both {" and ".join("a " + k for k, _ in found)}; give the dotted path')
    target = found[0][1]
    return target.load() if hasattr(target, "load") and hasattr(target, "group") else target
