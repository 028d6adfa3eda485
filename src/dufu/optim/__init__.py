"""Optimizers, parameter groups and learning-rate schedules."""

from dufu.optim.adafactor import Adafactor
from dufu.optim.adam import Adam, AdamW
from dufu.optim.decays import ConstantLR, InverseSqrtLR, LinearLR, OneCycleLR, PolynomialLR, WarmupStableDecayLR
from dufu.optim.groups import get_default_optimizer_params
from dufu.optim.lamb import LAMB
from dufu.optim.schedules import (
    Schedule,
    WarmupCosineAnnealingLR,
    WarmupCosineLR,
    WarmupExponentialLR,
    WarmupMultiStepLR,
    WarmupPolynomialLR,
    WarmupStepLR,
)
from dufu.optim.sgd import SGD
from dufu.optim.whole import Part, WholeParameterOptimizer

__all__ = [
    "LAMB",
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "ConstantLR",
    "InverseSqrtLR",
    "LinearLR",
    "OneCycleLR",
    "Part",
    "PolynomialLR",
    "Schedule",
    "WarmupCosineAnnealingLR",
    "WarmupCosineLR",
    "WarmupExponentialLR",
    "WarmupMultiStepLR",
    "WarmupPolynomialLR",
    "WarmupStableDecayLR",
    "WarmupStepLR",
    "WholeParameterOptimizer",
    "get_default_optimizer_params",
]
