"""Qwen 2, 2.5 and 3 (Yang et al., 2024 and 2025), dense and with mixtures of experts."""

from dufu.models.qwen.model import Qwen2, Qwen3
from dufu.models.qwen.moe import Qwen2Moe, Qwen3Moe
from dufu.models.qwen.sizes import SIZES

__all__ = ["SIZES", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"]
