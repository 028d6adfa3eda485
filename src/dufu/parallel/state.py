"""The state that a unit hands to the next one, as a list of tensors and a description: a tensor, or tuples and dicts of tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dufu.errors import DufuError

Shape = Any  # of JSON values, so that it can be sent: "none", "tensor", ["tuple", …], ["dict", {name: …}]


def flatten(state: Any, what: str) -> tuple[Shape, list[Tensor]]:
    """Take a state apart.

    Raises:
        DufuError: it holds something that is no tensor; `what` says whose it is.
    """
    if state is None:
        return "none", []
    if isinstance(state, Tensor):
        return "tensor", [state]
    if isinstance(state, (tuple, list)):
        parts = [flatten(value, what) for value in state]
        return ["tuple", *(shape for shape, _ in parts)], [tensor for _, tensors in parts for tensor in tensors]
    if isinstance(state, dict):
        named = {str(name): flatten(value, what) for name, value in state.items()}
        return ["dict", {name: shape for name, (shape, _) in named.items()}], [t for _, tensors in named.values() for t in tensors]
    raise DufuError(
        f"{what} returns a {type(state).__name__}; units of a pipeline hand on tensors, and tuples and dicts of tensors"
    )


def rebuild(shape: Shape, tensors: list[Tensor]) -> Any:
    """Put a state together again; the inverse of `flatten`."""
    rest = iter(tensors)

    def build(part: Shape) -> Any:
        if part == "none":
            return None
        if part == "tensor":
            return next(rest)
        kind, *inner = part
        return tuple(build(p) for p in inner) if kind == "tuple" else {name: build(p) for name, p in inner[0].items()}

    return build(shape)
