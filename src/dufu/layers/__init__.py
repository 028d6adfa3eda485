"""Layers to build on. Each works alone in anybody's code; each says how it may be split, and knows nothing of ranks."""

from dufu.layers.attention import Attention, KeyValueCache
from dufu.layers.bias import AlibiBias, RelativeBias
from dufu.layers.dropout import Dropout, DropPath, drop_path
from dufu.layers.embedding import Embedding, VocabEmbedding
from dufu.layers.head import LMLogits, OutputEmbedding, Pooler
from dufu.layers.initial import Constant, Normal, ZeroRow
from dufu.layers.linear import Conv1D, Linear
from dufu.layers.loss import CrossEntropyLoss, KLDivergenceLoss, ParallelCrossEntropyLoss
from dufu.layers.mask import Mask, build_mask
from dufu.layers.mlp import MLP, GatedMLP, build_activation
from dufu.layers.moe import MixtureOfExperts
from dufu.layers.norm import HeadRMSNorm, LayerNorm, RMSLayerNorm, RMSNorm
from dufu.layers.patch import PatchEmbedding
from dufu.layers.position import LearnedPositionalEmbedding, SinePositionalEmbedding
from dufu.layers.rotary import LinearScaling, Llama3Scaling, RotaryEmbedding, YarnScaling, rotate
from dufu.layers.router import Router, Routing
from dufu.layers.transformer import TransformerLayer

Linear1D = Linear

__all__ = [
    "MLP",
    "AlibiBias",
    "Attention",
    "Constant",
    "Conv1D",
    "CrossEntropyLoss",
    "DropPath",
    "Dropout",
    "Embedding",
    "GatedMLP",
    "HeadRMSNorm",
    "KLDivergenceLoss",
    "KeyValueCache",
    "LMLogits",
    "LayerNorm",
    "LearnedPositionalEmbedding",
    "Linear",
    "Linear1D",
    "LinearScaling",
    "Llama3Scaling",
    "Mask",
    "MixtureOfExperts",
    "Normal",
    "OutputEmbedding",
    "ParallelCrossEntropyLoss",
    "PatchEmbedding",
    "Pooler",
    "RMSLayerNorm",
    "RMSNorm",
    "RelativeBias",
    "RotaryEmbedding",
    "Router",
    "Routing",
    "SinePositionalEmbedding",
    "TransformerLayer",
    "VocabEmbedding",
    "YarnScaling",
    "ZeroRow",
    "build_activation",
    "build_mask",
    "drop_path",
    "rotate",
]
