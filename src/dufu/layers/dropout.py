"""Dropout whose mask is a function of (seed, step, sample, position, place, feature)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.errors import ConfigError
from dufu.layers.random import counters, derive, keep_mask, keep_scale, stable_hash, threshold
from dufu.layers.split import WHOLE, Split


class _Masked(torch.autograd.Function):
    """y = x · mask · scale, keeping one byte an element for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        # The scale comes last: a half-precision product of mask and scale would round the scale itself.
        return mask.to(x.dtype).mul_(x).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return mask.to(grad.dtype).mul_(grad).mul_(ctx.scale), None, None


def masked(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return x · mask · scale."""
    y: Tensor = _Masked.apply(x, mask, scale)
    return y


def _check(what: str, p: float) -> None:
    if not 0.0 <= p < 1.0 or threshold(p) == 65536:
        raise ConfigError(f"{what} probability {p}: from 0 to below 1 (at most {65535 / 65536:.6f}: decisions are made on 16 bits)")


class Dropout(nn.Module):
    """Zero a share `p` of the features and scale up the rest.

    Given `keys` (see `random.token_keys`) the mask depends on them and on the module's place in the model, which
    `name_places` sets; without keys it is PyTorch's dropout, for use outside a dufu model.

    Args:
        p: probability in [0, 1).
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        _check("dropout", p)
        self.p = p
        self.place = place_of("")
        self.stream: Split = WHOLE  # of whose positions x holds a stretch; keys are whole

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """x (…, F) and keys (…), such as (B, T, F) and (B, T) → the shape of x."""
        if not self.training or self.p == 0.0:
            return x
        if keys is None:
            return functional.dropout(x, self.p, True)
        return masked(x, keep_mask(derive(self.stream.own(keys), self.place), x.shape[-1], self.p), keep_scale(self.p))

    def part(self, x: Tensor, keys: Tensor | None, first: int) -> Tensor:
        """Drop features of which x (…, F) holds those from number `first` on; the keys (…) are of the positions of x."""
        if not self.training or self.p == 0.0:
            return x
        if keys is None:
            return functional.dropout(x, self.p, True)
        return masked(x, keep_mask(derive(keys, self.place), x.shape[-1], self.p, first), keep_scale(self.p))

    def attention(self, probs: Tensor, keys: Tensor | None, first_head: int) -> Tensor:
        """Drop attention probabilities.

        Args:
            probs: (B, H, T, S).
            keys: (B, T) of the queries.
            first_head: number of this process's first head in the whole layer.
        """
        if not self.training or self.p == 0.0:
            return probs
        if keys is None:
            return functional.dropout(probs, self.p, True)
        return masked(probs, self.attention_mask(keys, first_head, probs.shape[1], probs.shape[-1]), keep_scale(self.p))

    def attention_mask(self, keys: Tensor, first_head: int, heads: int, size: int, first: int = 0) -> Tensor:
        """Return which probabilities stay: (B, heads, T, size) bool.

        Args:
            keys: (B, T) of the queries.
            first_head: number of the first of the heads in the whole layer.
            size: attended tokens, from place `first` of the whole sequence.
        """
        numbers = counters(first_head + 1, heads, keys.device).view(1, -1, 1)
        return keep_mask(derive(derive(keys, self.place).unsqueeze(1), numbers), size, self.p, first)

    def extra_repr(self) -> str:
        """Describe the layer for print(model)."""
        return f"p={self.p}"


def drop_path(x: Tensor, p: float, keys: Tensor | None, place: int | Tensor, scale_by_keep: bool = True) -> Tensor:
    """Drop whole samples of a residual branch (Huang et al., "Deep networks with stochastic depth", 2016).

    Args:
        x: (B, …).
        p: probability of dropping a sample.
        keys: (B, T) token keys of whole samples; the first of each decides. None = PyTorch's generator.
        place: which of the model's branches it is.
        scale_by_keep: divide what is kept by the probability of keeping it.
    """
    if keys is None:
        keep = torch.rand(x.shape[0], device=x.device) >= p
        scale = 1.0 / (1.0 - p)
    else:
        keep, scale = keep_mask(derive(keys[:, 0], place), 1, p)[:, 0], keep_scale(p)
    shape = (-1,) + (1,) * (x.dim() - 1)
    return masked(x, keep.view(shape).expand_as(x), scale if scale_by_keep else 1.0)


class DropPath(nn.Module):
    """Stochastic depth as a module; see `drop_path`. Each branch needs one of its own, or branches fall together."""

    def __init__(self, p: float = 0.0, scale_by_keep: bool = True) -> None:
        super().__init__()
        _check("drop path", p)
        self.p, self.scale_by_keep = p, scale_by_keep
        self.place = place_of("")

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """x (B, …) → (B, …)."""
        if not self.training or self.p == 0.0:
            return x
        return drop_path(x, self.p, keys, self.place, self.scale_by_keep)

    def extra_repr(self) -> str:
        """Describe the layer for print(model)."""
        return f"p={self.p}"


def place_of(name: str) -> Tensor:
    """Return the place of a module of that name: a number in a tensor of its own.

    As a Python number it would be a constant of the compiled code, which every layer would then need a copy of.
    """
    return torch.tensor(stable_hash("place", name), dtype=torch.int64, device="cpu")


def name_places(model: nn.Module) -> None:
    """Give every dropout of a model its place: a hash of its name, the same in every layout and pipeline stage."""
    for name, module in model.named_modules():
        if isinstance(module, (Dropout, DropPath)):
            module.place = place_of(name)
