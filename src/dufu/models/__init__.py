"""Model families, one folder each: the network, its named sizes, its names in other formats."""

from dufu.models.albert import Albert
from dufu.models.bart import Bart
from dufu.models.bert import Bert, BertClassifier, BertFeatures
from dufu.models.bloom import Bloom
from dufu.models.chain import Batch, ChainModel
from dufu.models.chatglm import ChatGLM
from dufu.models.clip import CLIP
from dufu.models.gemma import Gemma
from dufu.models.glm import Glm, Glm4
from dufu.models.gpt2 import GPT2
from dufu.models.huggingface import HuggingFace
from dufu.models.llama import Llama
from dufu.models.lora import Lora
from dufu.models.mistral import Mistral
from dufu.models.mixtral import Mixtral
from dufu.models.opt import OPT
from dufu.models.qwen import Qwen2, Qwen2Moe, Qwen3, Qwen3Moe
from dufu.models.resmlp import ResMLP
from dufu.models.roberta import Roberta, RobertaClassifier, RobertaFeatures
from dufu.models.swin import SwinTransformer, SwinTransformerV2
from dufu.models.t5 import MT5, T5
from dufu.models.vit import VisionTransformer

__all__ = [
    "CLIP",
    "GPT2",
    "MT5",
    "OPT",
    "T5",
    "Albert",
    "Bart",
    "Batch",
    "Bert",
    "BertClassifier",
    "BertFeatures",
    "Bloom",
    "ChainModel",
    "ChatGLM",
    "Gemma",
    "Glm",
    "Glm4",
    "HuggingFace",
    "Llama",
    "Lora",
    "Mistral",
    "Mixtral",
    "Qwen2",
    "Qwen2Moe",
    "Qwen3",
    "Qwen3Moe",
    "ResMLP",
    "Roberta",
    "RobertaClassifier",
    "RobertaFeatures",
    "SwinTransformer",
    "SwinTransformerV2",
    "VisionTransformer",
]
