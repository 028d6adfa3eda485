"""Gemma 1 (Gemma Team, 2024)."""

from dufu.models.gemma.model import Gemma
from dufu.models.gemma.sizes import SIZES

__all__ = ["SIZES", "Gemma"]
