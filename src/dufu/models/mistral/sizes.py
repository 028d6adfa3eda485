"""Named sizes: arguments of Mistral, those of the published releases."""

from __future__ import annotations

from typing import Any


def _size(layers: int, hidden: int, ffn: int, heads: int, kv: int, length: int, vocab: int | None, **more: Any) -> dict[str, Any]:
    return {
        "hidden_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": kv, "max_seq_length": length, "vocab_size": vocab, **more,
    }  # fmt: skip


SIZES = {
    "mistral_7b_v0.1": _size(32, 4096, 14336, 32, 8, 32768, 32000, sliding_window=4096),
    "mistral_7b_v0.2": _size(32, 4096, 14336, 32, 8, 32768, 32000, rotary_base=1000000.0, sliding_window=None),
    "mistral_7b_v0.3": _size(32, 4096, 14336, 32, 8, 32768, 32768, rotary_base=1000000.0, sliding_window=None),
    "mistral_nemo_12b": _size(40, 5120, 14336, 32, 8, 1024000, 131072, head_size=128, rotary_base=1000000.0, sliding_window=None),
}
