"""Named sizes: arguments of Bart, of Lewis et al. (2020) and Liu et al. (2020)."""

from __future__ import annotations

from typing import Any


def _size(layers: int, hidden: int, heads: int, vocab: int | None = 50265, length: int = 1024) -> dict[str, Any]:
    return {
        "hidden_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": heads,
        "max_seq_length": length,
        "vocab_size": vocab,
    }


SIZES = {
    "bart_tiny": _size(2, 128, 4, None, 128),
    "bart_base": _size(6, 768, 12),
    "bart_large": _size(12, 1024, 16),
    "mbart_large": {**_size(12, 1024, 16, 250027), "apply_residual_post_layernorm": False, "scale_embedding": True},
}
