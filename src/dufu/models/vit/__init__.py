"""ViT (Dosovitskiy et al., "An image is worth 16x16 words", 2020)."""

from dufu.models.vit.model import VisionTransformer
from dufu.models.vit.sizes import SIZES

__all__ = ["SIZES", "VisionTransformer"]
