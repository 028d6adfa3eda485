"""Every attention mask: causal, padding, separate documents, and their combinations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """What each query may attend to.

    Args:
        allowed: bool, broadcastable to (B, H, T, S), True where attention is allowed; None = everywhere.
        causal: with `allowed` None, the plain lower triangle, which fused kernels know by themselves.
        empty_rows: whether some query may have nothing to attend to; its output is then exactly zero.
    """

    allowed: Tensor | None = None
    causal: bool = False
    empty_rows: bool = False

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Return the mask as a bool tensor, or None when everything is allowed."""
        if self.allowed is not None:
            return self.allowed
        return causal_mask(queries, keys, device) if self.causal else None


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Return (queries, keys) bool: the last query sees all keys, each earlier one a key less."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def build_mask(
    *,
    causal: bool,
    queries: int,
    keys: int | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    device: torch.device | None = None,
) -> Mask:
    """Build the mask of a batch.

    Args:
        causal: whether a query sees no later key.
        queries: number of queries T.
        keys: number of keys S; None = T.
        padding: (B, S) bool or integer, true for real keys.
        documents: (B, S) number of the document of each token; tokens see their own document only.

    Returns:
        The mask; the plain causal and the full one need no tensor.
    """
    keys = queries if keys is None else keys
    if padding is None and documents is None:
        if not causal or queries == 1:
            return Mask()
        return Mask(causal=True) if queries == keys else Mask(allowed=causal_mask(queries, keys, device))
    allowed: Tensor | None = None
    if padding is not None:
        allowed = padding.bool()[:, None, None, :]
    if documents is not None:
        same = (documents[:, -queries:, None] == documents[:, None, :])[:, None]
        allowed = same if allowed is None else allowed & same
    assert allowed is not None
    if causal:
        allowed = allowed & causal_mask(queries, keys, allowed.device)
    return Mask(allowed=allowed, empty_rows=padding is not None)
