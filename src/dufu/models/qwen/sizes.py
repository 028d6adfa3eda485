"""Named sizes: arguments of Qwen2, Qwen3, Qwen2Moe and Qwen3Moe. The published ones are those of the Qwen team's releases."""

from __future__ import annotations

from typing import Any


def _size(layers: int, hidden: int, ffn: int, heads: int, kv: int, length: int, vocab: int | None, **more: Any) -> dict[str, Any]:
    return {
        "hidden_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": kv, "max_seq_length": length, "vocab_size": vocab, **more,
    }  # fmt: skip


_TIED = {"tie_word_embeddings": True}

SIZES = {
    "qwen3_tiny": _size(2, 128, 352, 4, 2, 128, None),
    "qwen2_0.5b": _size(24, 896, 4864, 14, 2, 131072, 151936, **_TIED),
    "qwen2_1.5b": _size(28, 1536, 8960, 12, 2, 131072, 151936, **_TIED),
    "qwen2_7b": _size(28, 3584, 18944, 28, 4, 131072, 152064),
    "qwen2_72b": _size(80, 8192, 29568, 64, 8, 131072, 152064),
    "qwen2.5_0.5b": _size(24, 896, 4864, 14, 2, 32768, 151936, **_TIED),
    "qwen2.5_1.5b": _size(28, 1536, 8960, 12, 2, 131072, 151936, **_TIED),
    "qwen2.5_3b": _size(36, 2048, 11008, 16, 2, 32768, 151936, **_TIED),
    "qwen2.5_7b": _size(28, 3584, 18944, 28, 4, 131072, 152064),
    "qwen2.5_14b": _size(48, 5120, 13824, 40, 8, 131072, 152064, layernorm_epsilon=1e-5),
    "qwen2.5_32b": _size(64, 5120, 27648, 40, 8, 131072, 152064, layernorm_epsilon=1e-5),
    "qwen2.5_72b": _size(80, 8192, 29568, 64, 8, 131072, 152064),
    "qwen3_0.6b": _size(28, 1024, 3072, 16, 8, 40960, 151936, head_size=128, **_TIED),
    "qwen3_1.7b": _size(28, 2048, 6144, 16, 8, 40960, 151936, head_size=128, **_TIED),
    "qwen3_4b": _size(36, 2560, 9728, 32, 8, 40960, 151936, head_size=128, **_TIED),
    "qwen3_8b": _size(36, 4096, 12288, 32, 8, 40960, 151936, head_size=128),
    "qwen3_14b": _size(40, 5120, 17408, 40, 8, 40960, 151936, head_size=128),
    "qwen3_32b": _size(64, 5120, 25600, 64, 8, 40960, 151936, head_size=128),
    "qwen1.5_moe_a2.7b": _size(
        24, 2048, 5632, 16, 16, 8192, 151936, num_experts=60, moe_top_k=4, moe_ffn_hidden_size=1408, moe_shared_experts=4
    ),
    "qwen2_57b_a14b": _size(
        28, 3584, 18944, 28, 4, 131072, 151936, num_experts=64, moe_top_k=8, moe_ffn_hidden_size=2560, moe_shared_experts=8
    ),
    "qwen3_30b_a3b": _size(
        48, 2048, 6144, 32, 4, 40960, 151936, head_size=128, num_experts=128, moe_top_k=8, moe_ffn_hidden_size=768, moe_renormalize=True
    ),
    "qwen3_235b_a22b": _size(
        94, 4096, 12288, 64, 4, 40960, 151936, head_size=128, num_experts=128, moe_top_k=8, moe_ffn_hidden_size=1536,
        moe_renormalize=True,
    ),
}  # fmt: skip


def class_of(name: str) -> str:
    """Return the name of the class that a size is of."""
    return ("Qwen3" if name.startswith("qwen3") else "Qwen2") + ("Moe" if "_a" in name else "")
