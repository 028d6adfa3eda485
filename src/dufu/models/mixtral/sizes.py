"""Named sizes: arguments of Mixtral, those of the published releases."""

from __future__ import annotations

from typing import Any


def _size(layers: int, hidden: int, ffn: int, heads: int, kv: int, length: int, vocab: int | None, **more: Any) -> dict[str, Any]:
    return {
        "hidden_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": kv, "max_seq_length": length, "vocab_size": vocab, **more,
    }  # fmt: skip


SIZES = {
    "mixtral_8x7b": _size(32, 4096, 14336, 32, 8, 32768, 32000),
    "mixtral_8x22b": _size(56, 6144, 16384, 48, 8, 65536, 32768, moe_balance_weight=0.001),
}
