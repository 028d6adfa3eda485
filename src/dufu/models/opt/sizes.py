"""Named sizes: arguments of OPT, those of the published releases."""

from __future__ import annotations

from typing import Any


def _size(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 50272, **more}


SIZES = {
    "opt_125m": _size(12, 768, 12),
    "opt_350m": _size(24, 1024, 16, embedding_size=512, post_norm=True),
    "opt_1.3b": _size(24, 2048, 32),
    "opt_2.7b": _size(32, 2560, 32),
    "opt_6.7b": _size(32, 4096, 32),
    "opt_13b": _size(40, 5120, 40),
    "opt_30b": _size(48, 7168, 56),
    "opt_66b": _size(64, 9216, 72),
}
