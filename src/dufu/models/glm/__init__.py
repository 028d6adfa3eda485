"""GLM-4 and ChatGLM (GLM Team, 2024)."""

from dufu.models.glm.model import ChatGLM, Glm, Glm4
from dufu.models.glm.sizes import SIZES

__all__ = ["SIZES", "ChatGLM", "Glm", "Glm4"]
