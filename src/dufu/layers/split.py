"""The seam between a layer and tensor parallelism: what a split layer asks of whoever holds its other parts.

A layer calls these at the points where a split needs communication. By itself it holds the whole, and they do nothing;
`dufu.parallel` puts another object in their place. So no layer knows of ranks or of `torch.distributed`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SplitRule:
    """How one parameter is divided.

    Args:
        dim: the dimension that is divided.
        sections: lengths of stretches of `dim` that are divided each by itself (query, key and value of a fused projection);
            None = one stretch.
        padded: a length that does not divide is rounded up, the last part being padded (a vocabulary).
    """

    dim: int
    sections: tuple[int, ...] | None = None
    padded: bool = False


class Split:
    """The whole, held by one process."""

    size: int = 1
    rank: int = 0

    def enter(self, x: Tensor) -> Tensor:
        """Pass a replicated input into a divided product: identity; its gradient is summed over the parts."""
        return x

    def share(self, weight: Tensor) -> Tensor:
        """Use an undivided parameter in divided work: identity; its gradient becomes the sum over the parts."""
        return weight

    def whole(self, x: Tensor) -> Tensor:
        """Return, at all positions, what every part computes alike from its own: identity; so is the gradient, of its own positions."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Sum the parts' partial results: every part gets the whole; the gradient passes as it is."""
        return x

    def own(self, x: Tensor) -> Tensor:
        """Take this part's stretch of positions, (B, T, …) → (B, T or a part of it, …): of what is undivided, where parts share it."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the parts' slices of the last dimension, without gradient."""
        return x

    def sum_(self, x: Tensor) -> Tensor:
        """Sum in place over the parts, without gradient."""
        return x

    def max_(self, x: Tensor) -> Tensor:
        """Take the maximum in place over the parts, without gradient."""
        return x


WHOLE = Split()
