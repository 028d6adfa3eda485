"""What happens around steps: four points, cheap by contract, with state of their own in the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dufu.training.loop import Trainer


class Hook:
    """Base of hooks; every method may be left as it is.

    `trainer.step` counts finished updates: in `before_step` the update to come is number `trainer.step` from 0, in `after_step` it is done.
    """

    def before_train(self, trainer: Trainer) -> None:
        """Run once before the first step."""

    def before_step(self, trainer: Trainer) -> None:
        """Run before each step."""

    def after_step(self, trainer: Trainer) -> None:
        """Run after each step."""

    def after_train(self, trainer: Trainer) -> None:
        """Run once at the end, also after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values that a resumed run needs, the same on every process."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
