"""Tiny Hugging Face folders, as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dufu.data.tokenizer import byte_tokenizer

VOCAB = byte_tokenizer().vocab_size
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "llama": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
    "bert": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 64,
    },
}  # fmt: skip


def make(folder: Path, kind: str = "llama", shards: str = "20KB", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Write a folder with random weights and the bytes tokenizer; return transformers' model."""
    import transformers

    special = {"bos_token_id": None, "eos_token_id": VOCAB - 5, "pad_token_id": VOCAB - 4}
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCAB, **special, **{**SIZES[kind], **more})
    torch.manual_seed(7)
    chosen = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    model = chosen.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shards)
    byte_tokenizer().save(folder)
    return model


def texts() -> list[str]:
    return ["The quick brown fox", "jumps", "over the lazy dog, again and again"]
