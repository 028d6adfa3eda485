"""Named sizes: arguments of Albert. The published ones are those of Lan et al. (2019), version 2."""

from __future__ import annotations

from typing import Any


def _size(
    layers: int, hidden: int, heads: int, embedding: int = 128, length: int = 512, vocab: int | None = 30000
) -> dict[str, Any]:
    return {
        "hidden_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": heads,
        "embedding_size": embedding,
        "max_seq_length": length,
        "vocab_size": vocab,
    }


SIZES = {
    "albert_tiny": _size(2, 128, 4, 64, 128, None),
    "albert_base": _size(12, 768, 12),
    "albert_large": _size(24, 1024, 16),
    "albert_xlarge": _size(24, 2048, 16),
    "albert_xxlarge": _size(12, 4096, 64),
}
