"""Tiny random transformers models of each family of decoders, and ours with the same weights."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dufu.models.hf import describe_folder
from tests.models.foreign import import_state

VOCAB = 43
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
_THETA = {"rope_type": "default", "rope_theta": 500.0}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# name: (transformers' config class, its model class, arguments)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_SIZES, "rope_parameters": _LLAMA3}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_SIZES, "rope_parameters": _THETA, "rms_norm_eps": 1e-3}),
    "qwen2 with windows": ("Qwen2Config", "Qwen2ForCausalLM", {**_SIZES, **_WINDOW, "tie_word_embeddings": True}),
    "qwen2 with yarn": ("Qwen2Config", "Qwen2ForCausalLM", {**_SIZES, "rope_parameters": _YARN}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_SIZES, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen3 with windows": ("Qwen3Config", "Qwen3ForCausalLM", {**_SIZES, **_WINDOW, "head_dim": 8}),
    "qwen2_moe": (
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**_SIZES, **_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_SIZES, **_EXPERTS, "head_dim": 12, "norm_topk_prob": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_SIZES, "sliding_window": 6, "head_dim": 12}),
    "mistral with linear scaling": (
        "MistralConfig", "MistralForCausalLM",
        {**_SIZES, "sliding_window": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_SIZES, "num_local_experts": 4, "sliding_window": 7}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_SIZES, "head_dim": 12, "num_key_value_heads": 1}),
    "glm": (
        "GlmConfig", "GlmForCausalLM",
        {**_SIZES, "head_dim": 12, "rms_norm_eps": 1e-4, "rope_parameters": {**_THETA, "partial_rotary_factor": 0.5}},
    ),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {**_SIZES, "head_dim": 8, "attention_bias": False}),
    "opt": (
        "OPTConfig", "OPTForCausalLM",
        {**_NO_TOKENS, "vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
         "max_position_embeddings": 64},
    ),
    "opt with post-norm": (
        "OPTConfig", "OPTForCausalLM",
        {**_NO_TOKENS, "vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
         "max_position_embeddings": 64, "word_embed_proj_dim": 20, "do_layer_norm_before": False},
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", {**_NO_TOKENS, "vocab_size": VOCAB, "hidden_size": 30, "n_layer": 3, "n_head": 5}),
}  # fmt: skip


def theirs(name: str) -> Any:
    """Return a random transformers model whose every weight differs from its neighbours."""
    import transformers

    kind, model_class, arguments = FAMILIES[name]
    torch.manual_seed(11)
    model = getattr(transformers, model_class)(getattr(transformers, kind)(**arguments))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def ours(model: Any) -> tuple[str, dict[str, Any], dict[str, torch.Tensor], Any]:
    """Return (our class, its arguments, the tensors that theirs saves, our model with them)."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        state = load_file(Path(folder) / "model.safetensors")
        found = describe_folder(Path(folder))
    return found.target, found.cfg, state, import_state(found.target, found.cfg, state)
