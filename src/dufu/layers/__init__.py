"""Layers to build on. Each works alone in anybody's code; each says how it may be split, and knows nothing of ranks."""

from dufu.layers.attention import Attention, KeyValueCache
from dufu.layers.dropout import Dropout, DropPath, drop_path
from dufu.layers.embedding import Embedding, VocabEmbedding
from dufu.layers.head import LMLogits, OutputEmbedding, Pooler
from dufu.layers.initial import Constant, Normal
from dufu.layers.linear import Conv1D, Linear
from dufu.layers.loss import CrossEntropyLoss, KLDivergenceLoss, ParallelCrossEntropyLoss
from dufu.layers.mask import Mask, build_mask
from dufu.layers.mlp import MLP, GatedMLP, build_activation
from dufu.layers.norm import LayerNorm, RMSLayerNorm, RMSNorm
from dufu.layers.transformer import TransformerLayer

Linear1D = Linear

__all__ = [
    "MLP",
    "Attention",
    "Constant",
    "Conv1D",
    "CrossEntropyLoss",
    "DropPath",
    "Dropout",
    "Embedding",
    "GatedMLP",
    "KLDivergenceLoss",
    "KeyValueCache",
    "LMLogits",
    "LayerNorm",
    "Linear",
    "Linear1D",
    "Mask",
    "Normal",
    "OutputEmbedding",
    "ParallelCrossEntropyLoss",
    "Pooler",
    "RMSLayerNorm",
    "RMSNorm",
    "TransformerLayer",
    "VocabEmbedding",
    "build_activation",
    "build_mask",
    "drop_path",
]
