"""BART and mBART (Lewis et al., 2020; Liu et al., 2020)."""

from dufu.models.bart.model import Bart
from dufu.models.bart.sizes import SIZES

__all__ = ["SIZES", "Bart"]
