"""Dropout whose mask is a function of (seed, step, sample, position, place, feature)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.errors import ConfigError
from dufu.layers.random import derive, keep_mask, keep_scale, stable_hash


class _Masked(torch.autograd.Function):
    """y = x · mask · scale, keeping one byte an element for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return mask.to(x.dtype).mul_(scale).mul_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return mask.to(grad.dtype).mul_(ctx.scale).mul_(grad), None, None


def masked(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return x · mask · scale."""
    y: Tensor = _Masked.apply(x, mask, scale)
    return y


class Dropout(nn.Module):
    """Zero a share `p` of the features and scale up the rest.

    Given `keys` (see `random.token_keys`) the mask depends on them and on the module's place in the model, which
    `name_places` sets; without keys it is PyTorch's dropout, for use outside a dufu model.

    Args:
        p: probability in [0, 1).
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ConfigError(f"dropout probability {p}: in [0, 1)")
        self.p = p
        self.place = stable_hash("place", "")

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """x (B, T, F) and keys (B, T) → (B, T, F)."""
        if not self.training or self.p == 0.0:
            return x
        if keys is None:
            return functional.dropout(x, self.p, True)
        return masked(x, keep_mask(derive(keys, self.place), x.shape[-1], self.p), keep_scale(self.p))

    def attention(self, probs: Tensor, keys: Tensor | None, first_head: int) -> Tensor:
        """Drop attention probabilities: probs (B, H, T, S), keys (B, T) of the queries → (B, H, T, S)."""
        if not self.training or self.p == 0.0:
            return probs
        if keys is None:
            return functional.dropout(probs, self.p, True)
        heads = torch.arange(first_head + 1, first_head + 1 + probs.shape[1], device=probs.device).view(1, -1, 1)
        per_head = derive(derive(keys, self.place).unsqueeze(1), heads)
        return masked(probs, keep_mask(per_head, probs.shape[-1], self.p), keep_scale(self.p))

    def extra_repr(self) -> str:
        """Describe the layer for print(model)."""
        return f"p={self.p}"


def drop_path(x: Tensor, p: float, keys: Tensor | None, place: int, scale_by_keep: bool = True) -> Tensor:
    """Drop whole samples of a residual branch (Huang et al., "Deep networks with stochastic depth", 2016).

    Args:
        x: (B, …).
        keys: (B, T) token keys; the first of each sample decides. None = PyTorch's generator.
    """
    if keys is None:
        keep = torch.rand(x.shape[0], device=x.device) >= p
        scale = 1.0 / (1.0 - p)
    else:
        keep, scale = keep_mask(derive(keys[:, 0], place), 1, p)[:, 0], keep_scale(p)
    shape = (-1,) + (1,) * (x.dim() - 1)
    return masked(x, keep.view(shape).expand_as(x), scale if scale_by_keep else 1.0)


class DropPath(nn.Module):
    """Stochastic depth as a module; see `drop_path`."""

    def __init__(self, p: float = 0.0, scale_by_keep: bool = True) -> None:
        super().__init__()
        self.p, self.scale_by_keep = p, scale_by_keep
        self.place = stable_hash("place", "")

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """x (B, …) → (B, …)."""
        if not self.training or self.p == 0.0:
            return x
        return drop_path(x, self.p, keys, self.place, self.scale_by_keep)


def name_places(model: nn.Module) -> None:
    """Give every dropout of a model its place: a hash of its name, the same in every layout and pipeline stage."""
    for name, module in model.named_modules():
        if isinstance(module, (Dropout, DropPath)):
            module.place = stable_hash("place", name)
