"""Named sizes: arguments of Roberta. The published ones are those of Liu et al. (2019) and of XLM-R (Conneau et al., 2019)."""

from __future__ import annotations

from typing import Any


def _size(layers: int, hidden: int, heads: int, length: int = 512, vocab: int | None = 50265) -> dict[str, Any]:
    return {
        "hidden_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": heads,
        "max_seq_length": length,
        "vocab_size": vocab,
        "num_tokentypes": 1,
        "layernorm_epsilon": 1e-5,
        "sentence_objective": False,
    }


SIZES = {
    "roberta_tiny": _size(2, 128, 4, 128, None),
    "roberta_base": _size(12, 768, 12),
    "roberta_large": _size(24, 1024, 16),
    "xlm_roberta_base": _size(12, 768, 12, vocab=250002),
    "xlm_roberta_large": _size(24, 1024, 16, vocab=250002),
}
