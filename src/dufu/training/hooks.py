"""What happens around steps: four points, cheap by contract, with state of their own in the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import ListConfig

from dufu.config.instantiate import instantiate
from dufu.errors import ConfigError

if TYPE_CHECKING:
    from dufu.training.loop import Trainer


class Hook:
    """Base of hooks; every method may be left as it is.

    `trainer.step` counts finished updates: in `before_step` the update to come is number `trainer.step` from 0, in `after_step` it is done.
    A hook that speaks to other processes must do so on all of them, and never in `after_train` when `trainer.failed` is set.
    """

    def before_train(self, trainer: Trainer) -> None:
        """Run once before the first step, after a saved state was taken over."""

    def before_step(self, trainer: Trainer) -> None:
        """Run before each step."""

    def after_step(self, trainer: Trainer) -> None:
        """Run after each step."""

    def after_train(self, trainer: Trainer) -> None:
        """Run once at the end, also after an error (`trainer.failed`)."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values that a resumed run needs, the same on every process; called on every process."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""


def build_hooks(calls: Any) -> list[Hook]:
    """Return the hooks that `train.hooks` names: a recorded call, or a list of them.

    Raises:
        ConfigError: one of them is no hook.
    """
    if calls is None:
        return []
    hooks: list[Hook] = []
    for call in calls if isinstance(calls, (list, ListConfig)) else [calls]:
        built = instantiate(call)
        if not isinstance(built, Hook):
            raise ConfigError(f"train.hooks: {call} is no hook; derive from dufu.training.hooks.Hook")
        hooks.append(built)
    return hooks


def named(hooks: Sequence[Hook]) -> dict[str, Hook]:
    """Return hooks by the names under which a checkpoint keeps their states: the class, numbered where it occurs again."""
    found: dict[str, Hook] = {}
    for hook in hooks:
        name = base = type(hook).__name__
        number = 1
        while name in found:
            number += 1
            name = f"{base}#{number}"
        found[name] = hook
    return found
