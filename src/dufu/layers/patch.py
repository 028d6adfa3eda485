"""Pictures as sequences of patches."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.errors import ConfigError
from dufu.layers.initial import Constant, Described, Initial, Normal


class PatchEmbedding(Described):
    """Cut a picture into square patches and project each (Dosovitskiy et al., "An image is worth 16x16 words", 2020).

    Args:
        img_size, patch_size: side lengths in pixels; patches must tile the picture.
        in_chans: colours.
        embed_dim: width of a patch's vector.
        norm_layer: makes a norm of that width, applied at the end; None = no norm.
        flatten: True gives a sequence, False keeps the grid.
        init: how the projection begins; None = a normal with Glorot's standard deviation.
        bias: whether the projection has a bias.

    Shapes: (B, in_chans, img_size, img_size) → (B, patches, embed_dim), row by row; without `flatten` (B, embed_dim, rows, columns).

    Raises:
        ConfigError: the patches do not tile the picture, or a picture has another size.
    """

    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        norm_layer: Callable[[int], nn.Module] | None = None,
        flatten: bool = True,
        init: Initial | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if img_size % patch_size:
            near = round(img_size / patch_size) * patch_size or patch_size
            raise ConfigError(f"img_size {img_size} is not a multiple of patch_size {patch_size}; nearest: {near}")
        if norm_layer is not None and not flatten:
            raise ConfigError("PatchEmbedding: a norm works on the last dimension; set flatten=True or norm_layer=None")
        self.img_size, self.patch_size, self.flatten = img_size, patch_size, flatten
        self.num_patches = (img_size // patch_size) ** 2
        self.weight = nn.Parameter(torch.empty(embed_dim, in_chans, patch_size, patch_size))
        self.bias = nn.Parameter(torch.empty(embed_dim)) if bias else None
        std = math.sqrt(2.0 / (in_chans * patch_size**2 + embed_dim))
        self.initial = {"weight": init or Normal(std), "bias": Constant(0.0)}
        self.norm = norm_layer(embed_dim) if norm_layer is not None else None
        self.fill_alone()

    def forward(self, images: Tensor) -> Tensor:
        """Embed the patches."""
        if images.shape[-2:] != (self.img_size, self.img_size):
            height, width = images.shape[-2:]
            raise ConfigError(f"a picture of {height} x {width} pixels; this layer takes {self.img_size} x {self.img_size}")
        grid = functional.conv2d(images.to(self.weight.dtype), self.weight, self.bias, stride=self.patch_size)
        if not self.flatten:
            return grid
        patches = grid.flatten(2).transpose(1, 2)
        return patches if self.norm is None else self.norm(patches)
