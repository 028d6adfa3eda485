"""OPT's config.json and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.models.hf import Family, Fields, activation_name, refuse_unless
from dufu.models.names import Rule, Table, each, joined, same

TARGET = "dufu.models.opt.OPT"


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    for name, value in (
        ("enable_bias", True), ("layer_norm_elementwise_affine", True), ("_remove_final_layer_norm", False), ("layerdrop", 0.0),
        ("activation_dropout", 0.0),
    ):  # fmt: skip
        fields.expect(name, value)
    hidden = fields.whole("hidden_size")
    return TARGET, {
        "vocab_size": fields.whole("vocab_size"),
        "hidden_layers": fields.whole("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": fields.whole("ffn_dim"),
        "embedding_size": fields.whole("word_embed_proj_dim", hidden),
        "num_attention_heads": fields.whole("num_attention_heads"),
        "max_seq_length": fields.whole("max_position_embeddings", 2048),
        "attention_dropout_prob": fields.take("attention_dropout", 0.0),
        "output_dropout_prob": fields.take("dropout", 0.1),
        "initializer_range": fields.take("init_std", 0.02),
        "activation": fields.activation("activation_function", "relu"),
        "post_norm": not fields.take("do_layer_norm_before", True),
        "tie_word_embeddings": fields.take("tie_word_embeddings", True),
    }


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family. Dropout on the embedding is of training alone."""
    refuse_unless(cfg, "opt", layernorm_epsilon=1e-5)
    hidden = cfg["hidden_size"]
    return {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "vocab_size": cfg["vocab_size"],
        "num_hidden_layers": cfg["hidden_layers"],
        "hidden_size": hidden,
        "ffn_dim": cfg["ffn_hidden_size"] or 4 * hidden,
        "word_embed_proj_dim": cfg["embedding_size"] or hidden,
        "num_attention_heads": cfg["num_attention_heads"],
        "max_position_embeddings": cfg["max_seq_length"],
        "attention_dropout": cfg["attention_dropout_prob"],
        "dropout": cfg["output_dropout_prob"],
        "init_std": cfg["initializer_range"],
        "activation_function": activation_name(cfg["activation"]),
        "do_layer_norm_before": not cfg["post_norm"],
        "tie_word_embeddings": cfg["tie_word_embeddings"],
    }


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family."""
    hidden, tied, theirs = cfg["hidden_size"], cfg["tie_word_embeddings"], "model.decoder"
    leaves = ("weight", "bias")

    def layer(number: int) -> list[Rule]:
        a, b = f"layers.{number}.block", f"{theirs}.layers.{number}"
        pairs = (
            ("attention_norm", "self_attn_layer_norm"), ("attention.output", "self_attn.out_proj"), ("mlp_norm", "final_layer_norm"),
            ("mlp.expand", "fc1"), ("mlp.contract", "fc2"),
        )  # fmt: skip
        qkv = {leaf: [(f"{b}.self_attn.{part}_proj.{leaf}", hidden) for part in "qkv"] for leaf in leaves}
        return [
            *(joined(f"{a}.attention.query_key_value.{leaf}", names) for leaf, names in qkv.items()),
            *(same(f"{a}.{x}.{leaf}", f"{b}.{y}.{leaf}") for x, y in pairs for leaf in leaves),
        ]

    narrow = (cfg["embedding_size"] or hidden) != hidden
    projections = (("embedding.project", "project_in"), ("head.project", "project_out")) if narrow else ()
    norms = () if cfg["post_norm"] else tuple(same(f"head.norm.{x}", f"{theirs}.final_layer_norm.{x}") for x in leaves)
    return Table(
        rules=(
            same("embedding.word.weight", f"{theirs}.embed_tokens.weight"),
            same("embedding.position.weight", f"{theirs}.embed_positions.weight"),
            *(same(f"{x}.weight", f"{theirs}.{y}.weight") for x, y in projections),
            *each(cfg["hidden_layers"], layer),
            *norms,
            *(() if tied else (same("head.word.weight", "lm_head.weight"),)),
        ),
        copies={"lm_head.weight": f"{theirs}.embed_tokens.weight"} if tied else {},
        prefix="model.",
    )


FAMILY = Family((TARGET,), read, write, table)
