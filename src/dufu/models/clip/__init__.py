"""CLIP (Radford et al., "Learning transferable visual models from natural language supervision", 2021)."""

from dufu.models.clip.model import CLIP
from dufu.models.clip.sizes import SIZES

__all__ = ["CLIP", "SIZES"]
