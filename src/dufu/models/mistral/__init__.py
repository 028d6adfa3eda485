"""Mistral (Jiang et al., "Mistral 7B", 2023)."""

from dufu.models.mistral.model import Mistral
from dufu.models.mistral.sizes import SIZES

__all__ = ["SIZES", "Mistral"]
