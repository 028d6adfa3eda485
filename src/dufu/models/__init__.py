"""Model families, one folder each: the network, its named sizes, its names in other formats."""

from dufu.models.bert import Bert, BertClassifier
from dufu.models.chain import Batch, ChainModel
from dufu.models.gpt2 import GPT2
from dufu.models.huggingface import HuggingFace
from dufu.models.llama import Llama
from dufu.models.t5 import MT5, T5
from dufu.models.vit import VisionTransformer

__all__ = ["GPT2", "MT5", "T5", "Batch", "Bert", "BertClassifier", "ChainModel", "HuggingFace", "Llama", "VisionTransformer"]
