"""Named sizes: arguments of Bloom, those of the published releases."""

from __future__ import annotations

from typing import Any


def _size(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 250880}


SIZES = {
    "bloom_560m": _size(24, 1024, 16),
    "bloom_1b1": _size(24, 1536, 16),
    "bloom_1b7": _size(24, 2048, 16),
    "bloom_3b": _size(30, 2560, 32),
    "bloom_7b1": _size(30, 4096, 32),
    "bloom_176b": _size(70, 14336, 112),
}
