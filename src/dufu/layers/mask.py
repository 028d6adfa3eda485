"""Every attention mask: causal, padding, separate documents, windows, and their combinations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dufu.errors import ConfigError


@dataclass(frozen=True)
class Held:
    """Which tokens of its samples a process holds, where several processes share each sample.

    Args:
        places: (T,) places of the tokens held, in their order here.
        total: tokens of a whole sample.
        rows: (T,) places of the queries that masks and biases have a row for; None = all `total`.
        keys: (B, total) dropout keys of all tokens; None without dropout.
    """

    places: Tensor
    total: int
    rows: Tensor | None
    keys: Tensor | None = None


class Mask:
    """What each query may attend to.

    A query without a single allowed key has an output of exactly zero: softmax over nothing would be NaN. Inside, such a row allows
    every key and is marked in `empty`, so that neither forward nor backward ever meets an empty sum.

    Args:
        allowed: bool, broadcastable to (B, H, T, S), True where attention is allowed; None = everywhere.
        causal: the plain lower triangle, which fused kernels know by themselves; instead of `allowed`.
        may_be_empty: False where every query is known to have an allowed key, which saves looking.
        held: which tokens the rows are of, where they are not the last ones of the keys.
        looks_back: whether it is known that no query sees a later key.

    Raises:
        ConfigError: `allowed` is not bool, or is given together with `causal`.
    """

    def __init__(
        self,
        allowed: Tensor | None = None,
        causal: bool = False,
        may_be_empty: bool = True,
        held: Held | None = None,
        looks_back: bool = False,
    ) -> None:
        self.allowed, self.causal, self.held = allowed, causal, held
        self.looks_back = looks_back or causal
        self.empty: Tensor | None = None  # (…, T or 1, 1), True for queries with nothing to attend to
        self.windows: dict[int, Mask] = {}  # this mask within windows that several layers use
        if allowed is None:
            return
        if allowed.dtype != torch.bool:
            raise ConfigError(
                f"an attention mask is bool, True where attention is allowed, not {allowed.dtype}; add a score as bias="
            )
        if causal:
            raise ConfigError("Mask: give either allowed or causal; build_mask() combines causal with other rules")
        if may_be_empty:
            self.empty = ~allowed.any(-1, keepdim=True)
            self.allowed = allowed | self.empty

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Return the mask as a bool tensor, or None when everything is allowed."""
        if self.allowed is not None:
            return self.allowed
        return _lower(self.held, queries, keys, device) if self.causal else None

    def prepare_windows(self, windows: Iterable[int], queries: int, keys: int, device: torch.device) -> None:
        """Make this mask within each of these windows once for all layers; see `near`."""
        for window in windows:
            if window not in self.windows:
                self.windows[window] = self.near(window, queries, keys, device)

    def near(self, window: int | None, queries: int, keys: int, device: torch.device) -> Mask:
        """Return this mask within a sliding window (Beltagy et al., "Longformer", 2020).

        Args:
            window: a query sees the last so many keys up to its own place; None = all.
            queries, keys: numbers of both, where the mask itself does not say which queries it is of.
        """
        if window is None:
            return self
        if window in self.windows:
            return self.windows[window]
        if self.held is not None:
            queries, keys = self.held.total, self.held.total
        if window >= keys:
            return self
        rows = None if self.held is None else self.held.rows
        places = torch.arange(keys - queries, keys, device=device) if rows is None else rows
        seen = torch.arange(keys, device=places.device) > places[:, None] - window
        allowed = self.dense(queries, keys, device)
        if allowed is not None and self.empty is not None:
            allowed = allowed & ~self.empty
        both = seen if allowed is None else allowed & seen
        # Without padding a query's own place is in its window.
        return Mask(both, may_be_empty=self.allowed is not None, held=self.held, looks_back=self.looks_back)

    def part(self, queries: slice, keys: slice) -> Tensor | None:
        """Return the rows and columns of some queries and keys, or None when everything in them is allowed."""
        if self.allowed is not None:
            rows = self.allowed if self.allowed.shape[-2] == 1 else self.allowed[..., queries, :]
            return rows[..., keys]
        if not self.causal:
            return None
        assert self.held is not None and self.held.rows is not None
        places = self.held.rows[queries]
        return places[:, None] >= torch.arange(keys.start, keys.stop, device=places.device)


def as_mask(mask: Mask | Tensor | None) -> Mask:
    """Return a mask from a bool tensor (True = allowed), a Mask, or None (everything is allowed)."""
    return mask if isinstance(mask, Mask) else Mask(mask)


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Return (queries, keys) bool: the last query sees all keys, each earlier one a key less."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _lower(held: Held | None, queries: int, keys: int, device: torch.device | None) -> Tensor:
    """Return (queries, keys) bool: the keys at or before each query's place."""
    if held is None or held.rows is None:
        return causal_mask(queries, keys, device)
    return held.rows[:, None] >= torch.arange(keys, device=held.rows.device)


def build_mask(
    *,
    causal: bool,
    queries: int,
    keys: int | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    device: torch.device | None = None,
    held: Held | None = None,
) -> Mask:
    """Build the mask of a batch.

    Args:
        causal: whether a query sees no later key.
        queries: number of queries T.
        keys: number of keys S; None = T, or with `held` all of its tokens. The queries are the last T of the S places.
        padding: (B, S) bool or integer, true for real keys.
        documents: (B, S) number of the document of each token; tokens see their own document only.
        held: which tokens of the whole samples the queries are, instead of the last ones.

    Returns:
        The mask; the plain causal and the full one need no tensor.

    Raises:
        ConfigError: padding or documents are of another length than the keys.
    """
    rows = None if held is None else held.rows
    if held is not None:
        queries = held.total if rows is None else len(rows)
        keys = held.total if keys is None else keys
    keys = queries if keys is None else keys
    for name, given in (("padding", padding), ("documents", documents)):
        if given is not None and given.shape[-1] != keys:
            raise ConfigError(f"the {name} of an attention mask covers {given.shape[-1]} tokens, but there are {keys} keys")
    if padding is None and documents is None:
        if not causal or (queries == 1 and rows is None):
            return Mask(held=held)
        if queries == keys or rows is not None:
            return Mask(causal=True, held=held)
        return Mask(causal_mask(queries, keys, device), may_be_empty=keys < queries, held=held)
    allowed: Tensor | None = None
    if padding is not None:
        allowed = padding.bool()[:, None, None, :]
    if documents is not None:
        of_queries = documents[:, -queries:] if rows is None else documents[:, rows]
        same = (of_queries[:, :, None] == documents[:, None, :])[:, None]
        allowed = same if allowed is None else allowed & same
    assert allowed is not None
    if causal:
        allowed = allowed & _lower(held, queries, keys, allowed.device)
    return Mask(allowed, may_be_empty=padding is not None or keys < queries, held=held, looks_back=causal)
