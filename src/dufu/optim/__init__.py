"""Optimizers, parameter groups and learning-rate schedules."""

from dufu.optim.adamw import AdamW
from dufu.optim.groups import get_default_optimizer_params
from dufu.optim.schedules import WarmupCosineLR

__all__ = ["AdamW", "WarmupCosineLR", "get_default_optimizer_params"]
