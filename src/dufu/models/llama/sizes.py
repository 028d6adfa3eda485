"""Named sizes: arguments of Llama. The published ones are those of Meta's, TinyLlama's and Mistral's releases."""

from __future__ import annotations

from typing import Any


def _size(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    key_value_heads: int,
    length: int,
    vocab: int | None,
    base: float = 10000.0,
    **more: Any,
) -> dict[str, Any]:
    return {
        "hidden_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "max_seq_length": length,
        "vocab_size": vocab,
        "rotary_base": base,
        **more,
    }


_LONG = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 8192}

SIZES = {
    "llama_tiny": _size(2, 128, 352, 4, 2, 128, None),
    "tinyllama_1b": _size(22, 2048, 5632, 32, 4, 2048, 32000),
    "llama_7b": _size(32, 4096, 11008, 32, 32, 2048, 32000, layernorm_epsilon=1e-6),
    "llama_13b": _size(40, 5120, 13824, 40, 40, 2048, 32000, layernorm_epsilon=1e-6),
    "llama2_7b": _size(32, 4096, 11008, 32, 32, 4096, 32000),
    "llama2_13b": _size(40, 5120, 13824, 40, 40, 4096, 32000),
    "llama2_70b": _size(80, 8192, 28672, 64, 8, 4096, 32000),
    "llama3_8b": _size(32, 4096, 14336, 32, 8, 8192, 128256, 500000.0),
    "llama3_70b": _size(80, 8192, 28672, 64, 8, 8192, 128256, 500000.0),
    "llama3.1_8b": _size(32, 4096, 14336, 32, 8, 131072, 128256, 500000.0, rotary_scaling=_LONG),
    "llama3.2_1b": _size(
        16, 2048, 8192, 32, 8, 131072, 128256, 500000.0, rotary_scaling={**_LONG, "factor": 32.0}, tie_word_embeddings=True
    ),
    "mixtral_8x7b": _size(32, 4096, 14336, 32, 8, 32768, 32000, 1000000.0, num_experts=8, moe_top_k=2, moe_balance_weight=0.02),
}  # fmt: skip
