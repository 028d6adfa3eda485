"""Named sizes: arguments of Gemma, those of the published releases."""

from __future__ import annotations

from typing import Any


def _size(layers: int, hidden: int, ffn: int, heads: int, kv: int, length: int, vocab: int | None, **more: Any) -> dict[str, Any]:
    return {
        "hidden_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": kv, "max_seq_length": length, "vocab_size": vocab, **more,
    }  # fmt: skip


SIZES = {
    "gemma_2b": _size(18, 2048, 16384, 8, 1, 8192, 256000, head_size=256),
    "gemma_7b": _size(28, 3072, 24576, 16, 16, 8192, 256000, head_size=256),
}
