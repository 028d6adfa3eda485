"""OPT (Zhang et al., 2022)."""

from dufu.models.opt.model import OPT
from dufu.models.opt.sizes import SIZES

__all__ = ["OPT", "SIZES"]
