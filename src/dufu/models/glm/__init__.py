"""GLM-4 (GLM Team, 2024)."""

from dufu.models.glm.model import Glm, Glm4
from dufu.models.glm.sizes import SIZES

__all__ = ["SIZES", "Glm", "Glm4"]
