"""Mixtral (Jiang et al., "Mixtral of experts", 2024)."""

from dufu.models.mixtral.model import Mixtral
from dufu.models.mixtral.sizes import SIZES

__all__ = ["SIZES", "Mixtral"]
