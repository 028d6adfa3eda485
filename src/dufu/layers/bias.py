"""Position as a bias on attention scores: ALiBi and T5's relative buckets, for this process's heads only.

The distance of two tokens is that of their places in the sequence, the last query being the last key, as in every mask, unless the
queries' places are given (`Held.rows`).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from dufu.errors import LayoutError
from dufu.layers.initial import Described, Initial, Normal
from dufu.layers.split import WHOLE, Split, SplitRule


def _distances(queries: int, keys: int, device: torch.device | None, places: Tensor | None) -> Tensor:
    """Return (queries, keys): place of the key minus place of the query."""
    rows = torch.arange(keys - queries, keys, device=device) if places is None else places.to(device)
    return torch.arange(keys, device=device) - rows[:, None]


def alibi_slopes(heads: int) -> list[float]:
    """Return each head's slope: the powers of 2^(-8/heads); for a number that is no power of two, those of the power of two below it
    and then every other one of the power of two above it (Press et al., 2021)."""
    below = 1 << int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / below) for i in range(below)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / below) for i in range(heads - below)]


class AlibiBias(nn.Module):
    """Attention with linear biases (Press et al., "Train short, test long", 2021): -slope of the head · distance; no parameter.

    Args:
        num_attention_heads: heads of the whole layer.

    Shapes: (queries T, keys S) → (1, heads of this process, T, S), to be given to Attention as `bias`.
    """

    def __init__(self, num_attention_heads: int) -> None:
        super().__init__()
        self.heads = num_attention_heads
        self.split: Split = WHOLE

    def check_split(self, parts: int) -> None:
        """Raise LayoutError when the heads do not divide over `parts` processes."""
        if self.heads % parts:
            fits = [n for n in range(1, parts) if self.heads % n == 0]
            raise LayoutError(
                f"{self.heads} attention heads do not divide over tensor_parallel_size={parts}; the nearest size that fits is {fits[-1]}"
            )

    def forward(
        self, queries: int, keys: int | None = None, device: torch.device | None = None, places: Tensor | None = None
    ) -> Tensor:
        """Return the bias of the last `queries` of `keys` tokens, or of the queries at `places` (T,)."""
        mine = self.heads // self.split.size
        slopes = alibi_slopes(self.heads)[self.split.rank * mine : (self.split.rank + 1) * mine]
        steep = torch.tensor(slopes, device=device)[:, None, None]
        return (-steep * _distances(queries, keys or queries, device, places).abs()).unsqueeze(0)


def relative_buckets(distances: Tensor, buckets: int, longest: int, bidirectional: bool) -> Tensor:
    """Return the bucket of each distance (key minus query), as T5 numbers them (Raffel et al., 2020).

    Half of the buckets hold one distance each; the others widen by equal ratios up to `longest`, and the last holds all beyond.
    With `bidirectional` the upper half of all buckets is for later keys; otherwise later keys share bucket 0.
    """
    first = torch.zeros_like(distances)
    if bidirectional:
        buckets //= 2
        first = (distances > 0) * buckets
        away = distances.abs()
    else:
        away = (-distances).clamp(min=0)
    # A table, because logarithms that fall just short of a whole number differ from one runtime to another.
    table = torch.tensor(_buckets_of(buckets, longest), device=distances.device)
    return first + table[away.clamp(max=longest)]


@lru_cache(maxsize=64)
def _buckets_of(buckets: int, longest: int) -> tuple[int, ...]:
    """Return the buckets of the distances 0 to `longest` in one direction."""
    exact = buckets // 2
    # The tiny addend keeps a power that is exact in the formula (such as `longest` itself) from falling one bucket short.
    wide = [
        exact + math.floor(math.log(away / exact) / math.log(longest / exact) * (buckets - exact) + 1e-9)
        for away in range(exact, longest + 1)
    ]
    return (*range(min(exact, longest + 1)), *(min(bucket, buckets - 1) for bucket in wide))


class RelativeBias(Described):
    """A learned score for each bucket of distances and each head (T5; Raffel et al., 2020).

    Args:
        num_attention_heads: heads of the whole layer.
        num_buckets, max_distance: see `relative_buckets`.
        bidirectional: False where a query sees no later key.
        init: how the scores begin.

    Shapes: (queries T, keys S) → (1, heads of this process, T, S), to be given to Attention as `bias`.
    """

    def __init__(
        self,
        num_attention_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        init: Initial | None = None,
    ) -> None:
        super().__init__()
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.split: Split = WHOLE
        self.weight = nn.Parameter(torch.empty(num_buckets, num_attention_heads))
        self.initial = {"weight": init or Normal(0.02)}
        self.splits = {"weight": SplitRule(1)}
        self.fill_alone()

    def forward(self, queries: int, keys: int | None = None, places: Tensor | None = None) -> Tensor:
        """Return the bias of the last `queries` of `keys` tokens, or of the queries at `places` (T,)."""
        distances = _distances(queries, keys or queries, self.weight.device, places)
        rows = relative_buckets(distances, self.num_buckets, self.max_distance, self.bidirectional)
        return self.weight[rows].permute(2, 0, 1).unsqueeze(0)
