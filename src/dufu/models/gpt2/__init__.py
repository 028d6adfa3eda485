"""GPT-2 (Radford et al., 2019)."""

from dufu.models.gpt2.model import GPT2
from dufu.models.gpt2.sizes import SIZES

__all__ = ["GPT2", "SIZES"]
