"""The config.json and weights of ChatGLM2, ChatGLM3 and GLM-4 in the format of their own modelling code (model_type "chatglm")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.models.glm.hf import rotated_features
from dufu.models.hf import Family, Fields, refuse_unless
from dufu.models.names import Part, Rule, Table, each, pairwise, same
from dufu.models.rotary_hf import head_size

TARGET = "dufu.models.chatglm.ChatGLM"
# Fields whose other values compute another network.
_EXPECTED: dict[str, Any] = {
    "rmsnorm": True, "multi_query_attention": True, "add_bias_linear": False, "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True, "fp32_residual_connection": False, "interleaved_qkv": False, "quantization_bit": 0, "pre_seq_len": None,
    "prefix_projection": False, "original_rope": True, "hidden_dropout": 0.0, "tie_word_embeddings": False,
}  # fmt: skip


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    for name, value in _EXPECTED.items():
        fields.expect(name, value)
    fields.ignore(
        "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion", "classifier_dropout", "vocab_size"
    )
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    return TARGET, {
        "vocab_size": fields.whole("padded_vocab_size"),
        "hidden_layers": fields.whole("num_layers", ..., "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": fields.whole("ffn_hidden_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("multi_query_group_num"),
        "head_size": fields.whole("kv_channels", hidden // heads),
        "max_seq_length": fields.whole("seq_length"),
        "attention_dropout_prob": fields.take("attention_dropout", 0.0),
        "layernorm_epsilon": fields.take("layernorm_epsilon", 1e-5),
        "qkv_bias": fields.take("add_qkv_bias", False),
        "rotary_base": 10000.0 * fields.take("rope_ratio", 1),
    }


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family."""
    refuse_unless(cfg, "chatglm", activation="silu", rotary_scaling=None, partial_rotary_factor=0.5, tie_word_embeddings=False)
    return {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        **_EXPECTED,
        "padded_vocab_size": cfg["vocab_size"],
        "num_layers": cfg["hidden_layers"],
        "hidden_size": cfg["hidden_size"],
        "ffn_hidden_size": cfg["ffn_hidden_size"],
        "num_attention_heads": cfg["num_attention_heads"],
        "multi_query_group_num": cfg["num_key_value_heads"] or cfg["num_attention_heads"],
        "kv_channels": head_size(cfg),
        "seq_length": cfg["max_seq_length"],
        "attention_dropout": cfg["attention_dropout_prob"],
        "layernorm_epsilon": cfg["layernorm_epsilon"],
        "add_qkv_bias": cfg["qkv_bias"],
        "rope_ratio": cfg["rotary_base"] / 10000.0,
    }


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family."""
    size, heads, turned = head_size(cfg), cfg["num_attention_heads"], rotated_features(cfg)
    kv_heads = cfg["num_key_value_heads"] or heads

    def fused(ours: str, theirs: str) -> Rule:
        queries = pairwise(ours, theirs, heads, size, turned)
        # Keys and values follow the queries in the same tensor.
        keys = pairwise(ours, theirs, kv_heads, size, turned, heads * size)
        moved = tuple(Part(p.name, p.row, p.rows, p.start + heads * size) for p in keys)
        values = (heads + kv_heads) * size
        return Rule(ours, (*queries, *moved, Part(theirs, values, kv_heads * size, values)))

    def layer(number: int) -> list[Rule]:
        ours, theirs = f"layers.{number}.block", f"transformer.encoder.layers.{number}"
        leaves = ("weight", "bias") if cfg["qkv_bias"] else ("weight",)
        pairs = (
            ("attention_norm", "input_layernorm"), ("attention.output", "self_attention.dense"),
            ("mlp_norm", "post_attention_layernorm"), ("mlp.gate_up", "mlp.dense_h_to_4h"), ("mlp.contract", "mlp.dense_4h_to_h"),
        )  # fmt: skip
        return [
            *(fused(f"{ours}.attention.query_key_value.{x}", f"{theirs}.self_attention.query_key_value.{x}") for x in leaves),
            *(same(f"{ours}.{a}.weight", f"{theirs}.{b}.weight") for a, b in pairs),
        ]

    return Table(
        rules=(
            same("embedding.word.weight", "transformer.embedding.word_embeddings.weight"),
            *each(cfg["hidden_layers"], layer),
            same("head.norm.weight", "transformer.encoder.final_layernorm.weight"),
            same("head.word.weight", "transformer.output_layer.weight"),
        ),
        ignored=(r"transformer\.rotary_pos_emb\.inv_freq",),
    )


FAMILY = Family((TARGET,), read, write, table)
