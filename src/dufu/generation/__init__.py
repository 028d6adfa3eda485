"""Text out of a model: greedy and sampled decoding, batched, with a cache, in any layout."""

from dufu.generation.decoding import Decoding, decode
from dufu.generation.pipeline import TextGenerationPipeline, generate

__all__ = ["Decoding", "TextGenerationPipeline", "decode", "generate"]
