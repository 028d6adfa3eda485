"""ResMLP (Touvron et al., "ResMLP: feedforward networks for image classification with data-efficient training", 2021)."""

from dufu.models.resmlp.model import ResMLP
from dufu.models.resmlp.sizes import SIZES

__all__ = ["SIZES", "ResMLP"]
