"""Swin (Liu et al., "Swin transformer: hierarchical vision transformer using shifted windows", 2021) and Swin V2 (Liu et al., 2021)."""

from dufu.models.swin.model import SwinTransformer, SwinTransformerV2
from dufu.models.swin.sizes import SIZES

__all__ = ["SIZES", "SwinTransformer", "SwinTransformerV2"]
