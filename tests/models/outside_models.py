"""Tiny random transformers models for tests."""

from __future__ import annotations

from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
_GROUPED = {**_COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
# class → model_type, fields
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {**_GROUPED, "attention_dropout": 0.2}),
    "Qwen3ForCausalLM": ("qwen3", {**_GROUPED, "head_dim": 8}),
    "Gemma2ForCausalLM": ("gemma2", {**_GROUPED, "head_dim": 8, "attention_dropout": 0.1, "sliding_window": 4}),
    "Phi3ForCausalLM": ("phi3", {**_GROUPED, "resid_pdrop": 0.1}),
    "GlmForCausalLM": ("glm", {**_GROUPED, "head_dim": 8}),
    "GPTNeoXForCausalLM": ("gpt_neox", {**_COMMON, "intermediate_size": 48, "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "OPTForCausalLM": ("opt", {**_COMMON, "ffn_dim": 48, "dropout": 0.0, "attention_dropout": 0.1, "word_embed_proj_dim": 32}),
    "GPT2LMHeadModel": ("gpt2", {"vocab_size": 67, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2,
                                 "initializer_range": 0.2}),
    "BertForMaskedLM": ("bert", {**_COMMON, "intermediate_size": 48}),
    "BertForSequenceClassification": ("bert", {**_COMMON, "intermediate_size": 48}),
    "RobertaForMaskedLM": ("roberta", {**_COMMON, "intermediate_size": 48}),
    "ElectraForMaskedLM": ("electra", {**_COMMON, "intermediate_size": 48, "embedding_size": 16}),
    "T5ForConditionalGeneration": ("t5", {"vocab_size": 67, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8,
                                          "pad_token_id": 0, "decoder_start_token_id": 0}),
    "ViTForImageClassification": ("vit", {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
                                          "image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.1}),
}  # fmt: skip


def make(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a transformers model with random weights."""
    import transformers

    kind, fields = MODELS[name]
    torch.manual_seed(seed)
    return getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **{**fields, **changes}))


def batch_of(name: str, samples: int = 4, length: int = 10) -> dict[str, torch.Tensor]:
    """Return a batch as transformers takes it, without padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 67, (samples, length), generator=generator)
    if name.startswith("ViT"):
        return {"pixel_values": torch.randn(samples, 3, 16, 16, generator=generator), "labels": torch.arange(samples) % 2}
    if "Sequence" in name:
        return {"input_ids": ids, "labels": torch.arange(samples) % 2}
    return {"input_ids": ids, "labels": ids.flip(1) if "Masked" in name else ids}
