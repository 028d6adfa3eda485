"""Named sizes: arguments of ChatGLM, those of the published releases."""

from __future__ import annotations

from typing import Any


def _size(layers: int, hidden: int, ffn: int, heads: int, kv: int, length: int, vocab: int | None, **more: Any) -> dict[str, Any]:
    return {
        "hidden_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": kv, "max_seq_length": length, "vocab_size": vocab, **more,
    }  # fmt: skip


SIZES = {
    "chatglm2_6b": _size(28, 4096, 13696, 32, 2, 32768, 65024, layernorm_epsilon=1e-5),
    "chatglm3_6b": _size(28, 4096, 13696, 32, 2, 8192, 65024, layernorm_epsilon=1e-5),
}
