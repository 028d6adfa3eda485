"""RoBERTa (Liu et al., "RoBERTa: a robustly optimized BERT pretraining approach", 2019)."""

from dufu.models.roberta.model import Roberta, RobertaClassifier, RobertaFeatures
from dufu.models.roberta.sizes import SIZES

__all__ = ["SIZES", "Roberta", "RobertaClassifier", "RobertaFeatures"]
