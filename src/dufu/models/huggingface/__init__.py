"""Unmodified transformers models."""

from __future__ import annotations

from dufu.models.huggingface.model import HuggingFace, OutsideModel

__all__ = ["HuggingFace", "OutsideModel"]
