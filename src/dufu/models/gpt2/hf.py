"""GPT-2's config.json and weights. Hugging Face stores its linear weights as (in, out)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dufu.models.hf import Family, Fields, activation_name, refuse_unless
from dufu.models.names import Rule, Table, each, same, turned

TARGET = "dufu.models.gpt2.GPT2"


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    for name, allowed in (
        ("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False), ("reorder_and_upcast_attn", False),
        ("add_cross_attention", False),
    ):  # fmt: skip
        fields.expect(name, allowed)
    hidden = fields.whole("n_embd", 768, "hidden_size")
    return TARGET, {
        "vocab_size": fields.whole("vocab_size", 50257),
        "hidden_layers": fields.whole("n_layer", 12, "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": fields.whole("n_inner", 4 * hidden),
        "num_attention_heads": fields.whole("n_head", 12, "num_attention_heads"),
        "max_seq_length": fields.whole("n_positions", 1024, "max_position_embeddings"),
        "embedding_dropout_prob": fields.take("embd_pdrop", 0.1),
        "attention_dropout_prob": fields.take("attn_pdrop", 0.1),
        "output_dropout_prob": fields.take("resid_pdrop", 0.1),
        "layernorm_epsilon": fields.take("layer_norm_epsilon", 1e-5),
        "initializer_range": fields.take("initializer_range", 0.02),
        "activation": fields.activation("activation_function", "gelu_new"),
        "tie_word_embeddings": fields.take("tie_word_embeddings", True),
    }


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family."""
    refuse_unless(cfg, "gpt2", num_experts=0)
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": cfg["vocab_size"],
        "n_layer": cfg["hidden_layers"],
        "n_embd": cfg["hidden_size"],
        "n_inner": None if cfg["ffn_hidden_size"] == 4 * cfg["hidden_size"] else cfg["ffn_hidden_size"],
        "n_head": cfg["num_attention_heads"],
        "n_positions": cfg["max_seq_length"],
        "embd_pdrop": cfg["embedding_dropout_prob"],
        "attn_pdrop": cfg["attention_dropout_prob"],
        "resid_pdrop": cfg["output_dropout_prob"],
        "layer_norm_epsilon": cfg["layernorm_epsilon"],
        "initializer_range": cfg["initializer_range"],
        "activation_function": activation_name(cfg["activation"]),
        "tie_word_embeddings": cfg["tie_word_embeddings"],
    }


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family."""

    def layer(number: int) -> Sequence[Rule]:
        ours, theirs = f"layers.{number}.block", f"transformer.h.{number}"
        pairs = (
            ("attention.query_key_value", "attn.c_attn"), ("attention.output", "attn.c_proj"),
            ("mlp.expand", "mlp.c_fc"), ("mlp.contract", "mlp.c_proj"),
        )  # fmt: skip
        norms = (("attention_norm", "ln_1"), ("mlp_norm", "ln_2"))
        return [
            *(turned(f"{ours}.{a}.weight", f"{theirs}.{b}.weight") for a, b in pairs),
            *(same(f"{ours}.{a}.bias", f"{theirs}.{b}.bias") for a, b in pairs),
            *(same(f"{ours}.{a}.{leaf}", f"{theirs}.{b}.{leaf}") for a, b in norms for leaf in ("weight", "bias")),
        ]

    tied = cfg["tie_word_embeddings"]
    return Table(
        rules=(
            same("embedding.word.weight", "transformer.wte.weight"),
            same("embedding.position.weight", "transformer.wpe.weight"),
            *each(cfg["hidden_layers"], layer),
            same("head.norm.weight", "transformer.ln_f.weight"),
            same("head.norm.bias", "transformer.ln_f.bias"),
            *(() if tied else (same("head.word.weight", "lm_head.weight"),)),
        ),
        ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
        copies={"lm_head.weight": "transformer.wte.weight"} if tied else {},
        prefix="transformer.",
    )


FAMILY = Family((TARGET,), read, write, table)
