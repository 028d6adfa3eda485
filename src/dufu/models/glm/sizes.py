"""Named sizes: arguments of Glm and Glm4, those of the published releases."""

from __future__ import annotations

from typing import Any


def _size(layers: int, hidden: int, ffn: int, heads: int, kv: int, length: int, vocab: int | None, **more: Any) -> dict[str, Any]:
    return {
        "hidden_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": kv, "max_seq_length": length, "vocab_size": vocab, **more,
    }  # fmt: skip


SIZES = {
    "glm4_9b": _size(40, 4096, 13696, 32, 2, 8192, 151552),
    "glm4_9b_chat": _size(40, 4096, 13696, 32, 2, 131072, 151552, rotary_base=5000000.0),
    "glm4_0414_9b": _size(40, 4096, 13696, 32, 2, 32768, 151552, layernorm_epsilon=1e-5),
    "glm4_0414_32b": _size(61, 6144, 23040, 48, 2, 32768, 151552, layernorm_epsilon=1e-5, qkv_bias=False),
}


def class_of(name: str) -> str:
    """Return the name of the class that a size is of."""
    return "Glm4" if "0414" in name else "Glm"
