"""BLOOM (Le Scao et al., 2022)."""

from dufu.models.bloom.model import Bloom
from dufu.models.bloom.sizes import SIZES

__all__ = ["SIZES", "Bloom"]
