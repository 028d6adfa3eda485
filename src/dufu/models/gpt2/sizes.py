"""Named sizes: arguments of GPT2. The published ones are those of OpenAI's release."""

from __future__ import annotations

from typing import Any


def _size(layers: int, hidden: int, heads: int, length: int = 1024, vocab: int | None = 50257) -> dict[str, Any]:
    return {
        "hidden_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": heads,
        "max_seq_length": length,
        "vocab_size": vocab,
    }


SIZES = {
    "gpt2_tiny": _size(2, 128, 4, 128, None),
    "gpt2_small": _size(12, 768, 12),
    "gpt2_medium": _size(24, 1024, 16),
    "gpt2_large": _size(36, 1280, 20),
    "gpt2_xl": _size(48, 1600, 25),
}
