"""config.json files of releases as their authors wrote them, with the fields of the versions of their time."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
}  # fmt: skip
_LLAMA_LIKE: dict[str, Any] = {**_COMMON, "hidden_act": "silu", "initializer_range": 0.02}
_QWEN: dict[str, Any] = {
    **_LLAMA_LIKE, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "rms_norm_eps": 1e-06,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip

# (package, our size, the file)
CONFIGS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama3.1_8b", {
        **_LLAMA_LIKE, "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
    }),
    ("qwen", "qwen2.5_0.5b", {
        **_QWEN, "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False,
    }),
    ("qwen", "qwen3_0.6b", {
        **_QWEN, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True,
    }),
    ("qwen", "qwen1.5_moe_a2.7b", {
        **_QWEN, "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632,
        "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe", "num_attention_heads": 16,
        "num_hidden_layers": 24, "num_key_value_heads": 16, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": False, "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False, "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }),
    ("qwen", "qwen3_30b_a3b", {
        **_QWEN, "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "output_router_logits": False, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False,
    }),
    ("mistral", "mistral_7b_v0.1", {
        **_LLAMA_LIKE, "architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "vocab_size": 32000,
    }),
    ("mixtral", "mixtral_8x7b", {
        **_LLAMA_LIKE, "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    }),
    ("gemma", "gemma_2b", {
        **_COMMON, "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 256,
        "hidden_act": "gelu", "hidden_activation": None, "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 16384,
        "max_position_embeddings": 8192, "model_type": "gemma", "num_attention_heads": 8, "num_hidden_layers": 18,
        "num_key_value_heads": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0,
        "vocab_size": 256000,
    }),
    ("glm", "glm4_0414_9b", {
        **_LLAMA_LIKE, "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128,
        "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 32768, "model_type": "glm4",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "vocab_size": 151552,
    }),
    ("chatglm", "chatglm3_6b", {
        "model_type": "chatglm", "architectures": ["ChatGLMModel"], "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
        "add_bias_linear": False, "add_qkv_bias": True, "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True, "ffn_hidden_size": 13696, "fp32_residual_connection": False, "hidden_dropout": 0.0,
        "hidden_size": 4096, "kv_channels": 128, "layernorm_epsilon": 1e-05, "multi_query_attention": True,
        "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 28, "original_rope": True, "padded_vocab_size": 65024,
        "post_layer_norm": True, "rmsnorm": True, "seq_length": 8192, "use_cache": True, "torch_dtype": "float16",
        "transformers_version": "4.30.2", "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0,
    }),
    ("opt", "opt_350m", {
        **_COMMON, "_name_or_path": "facebook/opt-350m", "activation_dropout": 0.0, "activation_function": "relu",
        "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "do_layer_norm_before": False, "dropout": 0.1, "ffn_dim": 4096,
        "hidden_size": 1024, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt",
        "num_attention_heads": 16, "num_hidden_layers": 24, "pad_token_id": 1, "vocab_size": 50272, "word_embed_proj_dim": 512,
        "prefix": "</s>",
    }),
    ("bloom", "bloom_560m", {
        **_COMMON, "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"], "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "hidden_dropout": 0.0, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "model_type": "bloom", "n_embed": 1024, "n_inner": None,
        "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 1, "skip_bias_add": True,
        "skip_bias_add_qkv": False, "unk_token_id": 0, "vocab_size": 250880,
    }),
]  # fmt: skip
