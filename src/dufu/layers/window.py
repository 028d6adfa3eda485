"""Attention within windows of a grid: cutting and shifting the grid, and the windows' position biases and cosine attention.

A grid of patches is (B, rows · columns, C), row by row; its windows are (B · windows, window², C).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.layers.attention import Attention, KeyValueCache
from dufu.layers.initial import Constant, Described, Initial, Normal
from dufu.layers.linear import Linear
from dufu.layers.mask import Mask
from dufu.layers.rotary import Rotation
from dufu.layers.split import WHOLE, Split, SplitRule

_HIDDEN = 512  # of the small network that makes Swin V2's biases


class WindowGrid:
    """How a square grid is cut into windows.

    A grid that the windows do not tile is padded below and at the right; the padding takes part in attention, as it was published. With
    a shift the grid is rolled first, and patches that come together only by that do not attend to each other.

    Args:
        side: patches of the grid's side.
        window: of a window's side; at most `side`.
        shift: patches by which the grid is rolled; 0 where there is a single window.
    """

    def __init__(self, side: int, window: int, shift: int) -> None:
        self.side, self.window = side, min(window, side)
        self.shift = 0 if side <= window else shift
        self.padded = -(-side // self.window) * self.window
        self.across = self.padded // self.window

    def cut(self, x: Tensor) -> Tensor:
        """(B, side², …) → (B · windows, window², …)."""
        grid = x.unflatten(1, (self.side, self.side))
        more = self.padded - self.side
        if more:
            grid = functional.pad(grid, (*(0, 0) * (grid.dim() - 3), 0, more, 0, more))
        if self.shift:
            grid = torch.roll(grid, (-self.shift, -self.shift), (1, 2))
        blocks = grid.unflatten(2, (self.across, self.window)).unflatten(1, (self.across, self.window))
        windows: Tensor = blocks.transpose(2, 3).flatten(3, 4).flatten(0, 2)
        return windows

    def join(self, windows: Tensor) -> Tensor:
        """(B · windows, window², …) → (B, side², …): what `cut` has cut."""
        blocks = windows.unflatten(1, (self.window, self.window)).unflatten(0, (-1, self.across, self.across))
        grid = blocks.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if self.shift:
            grid = torch.roll(grid, (self.shift, self.shift), (1, 2))
        joined: Tensor = grid[:, : self.side, : self.side].flatten(1, 2)
        return joined

    def mask(self, samples: int, device: torch.device) -> Mask | None:
        """Return which patches of a window may attend to each other, for `samples` pictures; None = all."""
        if not self.shift:
            return None
        places = torch.arange(self.padded, device=device)
        region = (places >= self.padded - self.window).long() + (places >= self.padded - self.shift).long()
        regions = (
            (3 * region[:, None] + region[None, :])
            .unflatten(1, (self.across, self.window))
            .unflatten(0, (self.across, self.window))
        )
        flat = regions.transpose(1, 2).reshape(self.across**2, self.window**2)
        allowed = flat[:, :, None] == flat[:, None, :]
        return Mask(allowed.repeat(samples, 1, 1).unsqueeze(1), may_be_empty=False)


def window_places(window: int, device: torch.device) -> Tensor:
    """Return (window², window²): the number of each pair's offset (query minus key, row by row) among the (2 · window - 1)²."""
    places = torch.arange(window, device=device)
    away = places[:, None] - places[None, :] + window - 1
    rows = away[:, None, :, None] * (2 * window - 1)
    return (rows + away[None, :, None, :]).reshape(window**2, window**2)


class WindowBias(Described):
    """A learned score for each offset within a window and each head (Liu et al., "Swin transformer", 2021).

    Args:
        window: patches of a window's side.
        heads: of the whole layer.
        init: how the scores begin.

    Returns (1, heads of this process, window², window²), to be given to Attention as `bias`.
    """

    def __init__(self, window: int, heads: int, init: Initial | None = None) -> None:
        super().__init__()
        self.window = window
        self.split: Split = WHOLE
        self.weight = nn.Parameter(torch.empty((2 * window - 1) ** 2, heads))
        self.initial = {"weight": init or Normal(0.02)}
        self.splits = {"weight": SplitRule(1)}
        self.fill_alone()

    def forward(self) -> Tensor:
        """Return the biases."""
        return self.weight[window_places(self.window, self.weight.device)].permute(2, 0, 1).unsqueeze(0)


class ContinuousWindowBias(nn.Module):
    """Scores of offsets from a small network over their logarithms (Liu et al., "Swin transformer V2", 2021).

    Args:
        window: patches of a window's side.
        heads: of the whole layer.
        trained: the side of the windows that the network was trained with, to which offsets are scaled; 0 = `window`.
        init: how the network begins.

    Returns (1, heads of this process, window², window²), from 0 to 16.
    """

    def __init__(self, window: int, heads: int, trained: int = 0, init: Initial | None = None) -> None:
        super().__init__()
        self.window, self.trained = window, trained or window
        self.expand = Linear(2, _HIDDEN, init=init)
        self.contract = Linear(_HIDDEN, heads, bias=False, parallel="col", init=init)

    def offsets(self, device: torch.device) -> Tensor:
        """Return ((2 · window - 1)², 2): each offset on a logarithmic scale."""
        steps = torch.arange(-(self.window - 1), self.window, device=device, dtype=torch.float32)
        scaled = 8.0 * steps / max(1, self.trained - 1)
        logs = scaled.sign() * (scaled.abs() + 1.0).log2() / math.log2(8.0)
        return torch.stack(torch.meshgrid(logs, logs, indexing="ij"), -1).flatten(0, 1)

    def forward(self) -> Tensor:
        """Return the biases."""
        weight = self.expand.weight
        hidden = functional.relu(self.expand(self.offsets(weight.device).to(weight.dtype)))  # type: ignore[arg-type]
        scores: Tensor = self.contract(hidden)  # type: ignore[assignment]
        return 16.0 * scores[window_places(self.window, weight.device)].permute(2, 0, 1).unsqueeze(0).sigmoid()


class _QueryValueBias(Described):
    """Biases of queries and values; keys have none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.split: Split = WHOLE
        self.bias = nn.Parameter(torch.empty(2 * width))
        self.initial: dict[str, Initial] = {"bias": Constant(0.0)}
        self.splits = {"bias": SplitRule(0, sections=(width, width))}
        self.fill_alone()


class _HeadScale(Described):
    """A learned factor of each head, exp(weight), at most 100."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.split: Split = WHOLE
        self.weight = nn.Parameter(torch.empty(heads, 1, 1))
        self.initial: dict[str, Initial] = {"weight": Constant(math.log(10.0))}
        self.splits = {"weight": SplitRule(0)}
        self.fill_alone()

    def forward(self) -> Tensor:
        """Return the factors (heads of this process, 1, 1)."""
        return self.weight.clamp(max=math.log(100.0)).exp()


class CosineAttention(Attention):
    """Attention whose scores are cosines of queries and keys, times a learned factor of each head (Liu et al., 2021).

    Args:
        hidden_size, num_attention_heads: sizes.
        bias: whether queries and values have biases.
        others: those of Attention.
    """

    def __init__(self, hidden_size: int, num_attention_heads: int, bias: bool = True, **others: Any) -> None:
        super().__init__(hidden_size, num_attention_heads, bias=False, output_bias=True, scale=1.0, **others)
        self.query_value = _QueryValueBias(hidden_size) if bias else None
        self.head_scale = _HeadScale(num_attention_heads)

    def _within(self, hidden: Tensor, cache: KeyValueCache | None, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.query_key_value(hidden).chunk(3, -1)  # type: ignore[union-attr]
        if self.query_value is not None:
            of_q, of_v = self.query_value.bias.chunk(2)
            q, v = q + of_q, v + of_v
        q, k, v = self._heads(q), self._heads(k), self._heads(v)
        return functional.normalize(q, dim=-1) * self.head_scale(), functional.normalize(k, dim=-1), v


__all__ = ["ContinuousWindowBias", "CosineAttention", "WindowBias", "WindowGrid", "window_places"]
