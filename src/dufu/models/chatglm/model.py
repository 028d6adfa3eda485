"""ChatGLM2, ChatGLM3 and the first release of GLM-4 in the format of their own code."""

from __future__ import annotations

from dufu.config.registry import register_model
from dufu.models.glm.model import Glm


@register_model("chatglm")
class ChatGLM(Glm):
    """ChatGLM (GLM Team, "ChatGLM: a family of large language models", 2024): the network of Glm, under other names in other formats."""
