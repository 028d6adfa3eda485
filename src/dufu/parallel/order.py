"""Work on gradients in one fixed order on every process, begun as early in backward as that order allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn


class GradientOrder:
    """Launches group 0, 1, 2 … of parameters, each as soon as its gradients and those of all groups before it are complete.

    Every process then starts its collectives in the same order, whatever order its backward took.

    Args:
        groups: the parameters of each group.
        launch: called with a group's number, in order.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]], launch: Callable[[int], None]) -> None:
        self._sizes, self._launch = [len(group) for group in groups], launch
        self._missing: list[int] = []
        self._done = 0
        self.armed = False
        for number, group in enumerate(groups):
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(self._hook(number))

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self.armed:
                self._missing[number] -= 1
                self._go_on()

        return hook

    def _go_on(self) -> None:
        while self._done < len(self._missing) and self._missing[self._done] == 0:
            self._done += 1
            self._launch(self._done - 1)

    def arm(self) -> None:
        """Take note of the next backward's gradients."""
        self._missing, self._done, self.armed = list(self._sizes), 0, True

    def complete(self) -> None:
        """Launch what is left: groups of which some parameter took no part."""
        if not self.armed:
            self.arm()
        self._missing = [0] * len(self._sizes)
        self._go_on()
        self.armed = False
