"""T5 and mT5 (Raffel et al., 2020; Xue et al., 2021)."""

from dufu.models.t5.model import MT5, T5
from dufu.models.t5.sizes import SIZES

__all__ = ["MT5", "SIZES", "T5"]
