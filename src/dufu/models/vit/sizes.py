"""Named sizes: arguments of VisionTransformer, by width, patch and picture.

Base, large and huge are those of Dosovitskiy et al. (2020), tiny and small of Touvron et al. ("Training data-efficient image
transformers", 2020), giant and gigantic of Zhai et al. ("Scaling vision transformers", 2021).
"""

from __future__ import annotations

from typing import Any


def _size(patch: int, image: int, width: int, depth: int, heads: int, inner: int | None = None) -> dict[str, Any]:
    return {
        "img_size": image,
        "patch_size": patch,
        "embed_dim": width,
        "depth": depth,
        "num_heads": heads,
        "mlp_ratio": 4.0 if inner is None else inner / width,
    }


_WIDTHS: dict[str, tuple[Any, ...]] = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
    "giant": (1408, 40, 16, 6144),
    "gigantic": (1664, 48, 16, 8192),
}
_PUBLISHED = {
    "tiny": [(16, 224), (16, 384)],
    "small": [(32, 224), (32, 384), (16, 224), (16, 384)],
    "base": [(32, 224), (32, 384), (16, 224), (16, 384), (8, 224)],
    "large": [(32, 224), (32, 384), (16, 224), (16, 384)],
    "huge": [(14, 224)],
    "giant": [(14, 224)],
    "gigantic": [(14, 224)],
}

SIZES: dict[str, dict[str, Any]] = {
    f"vit_{name}_patch{patch}_{image}": _size(patch, image, *_WIDTHS[name])
    for name, shapes in _PUBLISHED.items()
    for patch, image in shapes
}
# For trials on small pictures, on a laptop; not published.
SIZES["vit_tiny"] = _size(4, 32, 64, 4, 4)
