"""Text → tokens on disk → samples → global batches."""

from dufu.data.bert import BertDataset
from dufu.data.causal_lm import CausalLMDataset
from dufu.data.feed import Feed
from dufu.data.indexed import IndexedTokens
from dufu.data.indexed_writer import IndexedWriter
from dufu.data.pictures import PictureDataset
from dufu.data.seq2seq import Seq2SeqDataset
from dufu.data.tokenizer import TextTokenizer, load_tokenizer

__all__ = [
    "BertDataset",
    "CausalLMDataset",
    "Feed",
    "IndexedTokens",
    "IndexedWriter",
    "PictureDataset",
    "Seq2SeqDataset",
    "TextTokenizer",
    "load_tokenizer",
]
