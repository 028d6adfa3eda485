"""Layer normalisation and root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.layers.initial import Constant, Described, Initial
from dufu.layers.split import WHOLE, Split


class LayerNorm(Described):
    """(x - mean) / √(var + eps) · weight + bias over the last dimension (Ba et al., 2016).

    Args:
        normalized_shape: size of the last dimension.
        eps: added to the variance.
        elementwise_affine: whether there are weight and bias.
        bias: whether there is a bias.
    """

    is_norm = True

    def __init__(self, normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.normalized_shape, self.eps = normalized_shape, eps
        self.weight = nn.Parameter(torch.empty(normalized_shape)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.empty(normalized_shape)) if elementwise_affine and bias else None
        self.initial: dict[str, Initial] = {"weight": Constant(1.0), "bias": Constant(0.0)}
        self.fill_alone()

    def forward(self, x: Tensor) -> Tensor:
        """(…, normalized_shape) → the same shape."""
        return functional.layer_norm(x, (self.normalized_shape,), self.weight, self.bias, self.eps)


class RMSNorm(Described):
    """x / √(mean(x²) + eps) · (offset + weight) over the last dimension (Zhang and Sennrich, 2019).

    Args:
        normalized_shape: size of the last dimension.
        eps: added to the mean square.
        offset: 1 where the weight is trained as a difference from one, as Gemma's is (Gemma Team, 2024).
    """

    is_norm = True

    def __init__(self, normalized_shape: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.normalized_shape, self.eps, self.offset = normalized_shape, eps, offset
        self.weight = nn.Parameter(torch.empty(normalized_shape))
        self.initial: dict[str, Initial] = {"weight": Constant(1.0 - offset)}
        self.fill_alone()

    def forward(self, x: Tensor) -> Tensor:
        """(…, normalized_shape) → the same shape."""
        return self._normed(x, self.weight)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self.offset:
            return functional.rms_norm(x, (self.normalized_shape,), weight, self.eps)
        # In float32, since one plus a small half-precision weight is one.
        y = functional.rms_norm(x.float(), (self.normalized_shape,), None, self.eps)
        return (y * (self.offset + weight.float())).to(x.dtype)


class HeadRMSNorm(RMSNorm):
    """An RMSNorm over each head's features, its one weight shared by the heads of all tensor-parallel processes.

    Shapes: (B, heads of this process, T, head size) → the same.
    """

    def __init__(self, normalized_shape: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__(normalized_shape, eps, offset)
        self.split: Split = WHOLE

    def forward(self, x: Tensor) -> Tensor:
        """Norm each head."""
        return self._normed(x, self.split.share(self.weight))


RMSLayerNorm = RMSNorm
