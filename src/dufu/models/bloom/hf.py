"""BLOOM's config.json and weights. Its fused query, key and value go head by head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.models.hf import Family, Fields
from dufu.models.names import Rule, Table, by_head, each, same

TARGET = "dufu.models.bloom.Bloom"


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    hidden = fields.whole("hidden_size", ..., "n_embed")
    fields.expect("apply_residual_connection_post_layernorm", False)
    fields.expect("n_inner", None, 4 * hidden)
    # How their code computes the same, and a number of an older one that nothing reads.
    fields.ignore(
        "slow_but_exact", "pretraining_tp", "attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion", "skip_bias_add",
        "skip_bias_add_qkv", "offset_alibi",
    )  # fmt: skip
    return TARGET, {
        "vocab_size": fields.whole("vocab_size"),
        "hidden_layers": fields.whole("n_layer", ..., "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": fields.whole("n_head", ..., "num_attention_heads"),
        "max_seq_length": fields.whole("seq_length", 2048),
        "attention_dropout_prob": fields.take("attention_dropout", 0.0),
        "output_dropout_prob": fields.take("hidden_dropout", 0.0),
        "layernorm_epsilon": fields.take("layer_norm_epsilon", 1e-5),
        "initializer_range": fields.take("initializer_range", 0.02),
        "tie_word_embeddings": fields.take("tie_word_embeddings", True),
    }


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family. Dropout on the embedding is of training alone."""
    return {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "vocab_size": cfg["vocab_size"],
        "n_layer": cfg["hidden_layers"],
        "hidden_size": cfg["hidden_size"],
        "n_head": cfg["num_attention_heads"],
        "seq_length": cfg["max_seq_length"],
        "attention_dropout": cfg["attention_dropout_prob"],
        "hidden_dropout": cfg["output_dropout_prob"],
        "layer_norm_epsilon": cfg["layernorm_epsilon"],
        "initializer_range": cfg["initializer_range"],
        "tie_word_embeddings": cfg["tie_word_embeddings"],
    }


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family."""
    heads, tied = cfg["num_attention_heads"], cfg["tie_word_embeddings"]
    size = cfg["hidden_size"] // heads
    leaves = ("weight", "bias")

    def layer(number: int) -> list[Rule]:
        ours, theirs = f"layers.{number}.block", f"transformer.h.{number}"
        fused = (f"{ours}.attention.query_key_value", f"{theirs}.self_attention.query_key_value")
        pairs = (
            ("attention_norm", "input_layernorm"), ("attention.output", "self_attention.dense"),
            ("mlp_norm", "post_attention_layernorm"), ("mlp.expand", "mlp.dense_h_to_4h"), ("mlp.contract", "mlp.dense_4h_to_h"),
        )  # fmt: skip
        return [
            *(by_head(f"{fused[0]}.{leaf}", f"{fused[1]}.{leaf}", heads, size) for leaf in leaves),
            *(same(f"{ours}.{a}.{leaf}", f"{theirs}.{b}.{leaf}") for a, b in pairs for leaf in leaves),
        ]

    norms = (("embedding.norm", "word_embeddings_layernorm"), ("head.norm", "ln_f"))
    return Table(
        rules=(
            same("embedding.word.weight", "transformer.word_embeddings.weight"),
            *each(cfg["hidden_layers"], layer),
            *(same(f"{a}.{leaf}", f"transformer.{b}.{leaf}") for a, b in norms for leaf in leaves),
            *(() if tied else (same("head.word.weight", "lm_head.weight"),)),
        ),
        copies={"lm_head.weight": "transformer.word_embeddings.weight"} if tied else {},
        prefix="transformer.",
    )


FAMILY = Family((TARGET,), read, write, table)
