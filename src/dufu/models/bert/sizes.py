"""Named sizes: arguments of Bert. Base and large are those of Devlin et al. (2018), mini, small and medium of Turc et al. (2019)."""

from __future__ import annotations

from typing import Any


def _size(layers: int, hidden: int, heads: int, length: int = 512, vocab: int | None = 30522) -> dict[str, Any]:
    return {
        "hidden_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": heads,
        "max_seq_length": length,
        "vocab_size": vocab,
    }


SIZES = {
    "bert_tiny": _size(2, 128, 4, 128, None),
    "bert_mini": _size(4, 256, 4),
    "bert_small": _size(4, 512, 8),
    "bert_medium": _size(8, 512, 8),
    "bert_base": _size(12, 768, 12),
    "bert_large": _size(24, 1024, 16),
}
