"""Llama and its likes (Touvron et al., 2023; Jiang et al., "Mixtral of experts", 2024)."""

from dufu.models.llama.model import Llama
from dufu.models.llama.sizes import SIZES

__all__ = ["SIZES", "Llama"]
