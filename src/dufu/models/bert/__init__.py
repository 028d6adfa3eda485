"""BERT (Devlin et al., 2018)."""

from dufu.models.bert.model import Bert, BertClassifier, BertFeatures
from dufu.models.bert.sizes import SIZES

__all__ = ["SIZES", "Bert", "BertClassifier", "BertFeatures"]
