"""Named sizes: arguments of T5 (first and v1.1, Raffel et al., 2020, and the notes on v1.1) and of MT5 (Xue et al., 2021)."""

from __future__ import annotations

from typing import Any


def _size(layers: int, hidden: int, inner: int, heads: int, head_size: int = 64, vocab: int | None = 32128) -> dict[str, Any]:
    return {
        "hidden_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": inner,
        "num_attention_heads": heads,
        "head_size": head_size,
        "vocab_size": vocab,
    }


_GATED = {"gated_mlp": True, "activation": "gelu_tanh", "tie_word_embeddings": False}
_NEWER = {
    "small": (8, 512, 1024, 6),
    "base": (12, 768, 2048, 12),
    "large": (24, 1024, 2816, 16),
    "xl": (24, 2048, 5120, 32),
    "xxl": (24, 4096, 10240, 64),
}
SIZES = {
    # Gated as v1.1: where a ReLU's input is all but 0, rounding decides a gradient, and two layouts may differ by it.
    "t5_tiny": {**_size(2, 128, 256, 4, 32, None), **_GATED, "tie_word_embeddings": True, "max_seq_length": 128},
    "t5_small": _size(6, 512, 2048, 8),
    "t5_base": _size(12, 768, 3072, 12),
    "t5_large": _size(24, 1024, 4096, 16),
    "t5_3b": _size(24, 1024, 16384, 32, 128),
    "t5_11b": _size(24, 1024, 65536, 128, 128),
    **{f"t5_v1_1_{name}": {**_size(*size), **_GATED} for name, size in _NEWER.items()},
    **{f"mt5_{name}": {**_size(*size, vocab=250112), **_GATED} for name, size in _NEWER.items()},
}
