"""Optimizers, parameter groups and learning-rate schedules."""

from dufu.optim.adafactor import Adafactor
from dufu.optim.adam import Adam, AdamW
from dufu.optim.groups import get_default_optimizer_params
from dufu.optim.lamb import LAMB
from dufu.optim.schedules import WarmupCosineLR
from dufu.optim.sgd import SGD
from dufu.optim.whole import Part, WholeParameterOptimizer

__all__ = [
    "LAMB",
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Part",
    "WarmupCosineLR",
    "WholeParameterOptimizer",
    "get_default_optimizer_params",
]
