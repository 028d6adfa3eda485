"""ChatGLM (GLM Team, 2024)."""

from dufu.models.chatglm.model import ChatGLM
from dufu.models.chatglm.sizes import SIZES

__all__ = ["SIZES", "ChatGLM"]
