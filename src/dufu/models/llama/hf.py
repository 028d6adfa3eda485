"""Llama's config.json and weights (Llama 1 to 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dufu.errors import CheckpointError
from dufu.models.hf import Family, Fields, activation_name, refuse_unless
from dufu.models.names import Rule, Table, each, joined, same

TARGET = "dufu.models.llama.Llama"
# ours: theirs
_LLAMA3 = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}  # fmt: skip


def rotary(fields: Fields) -> tuple[float, dict[str, Any] | None]:
    """Return base and scaling of the rotary positions, from a file of any version.

    Raises:
        CheckpointError: a kind of scaling that is not built, or one that lacks a number.
    """
    values = dict(fields.take("rope_parameters", {}) or {})
    values.update(fields.take("rope_scaling", {}) or {})
    base = float(fields.take("rope_theta", values.pop("rope_theta", 10000.0)))
    kind = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    values.pop("rope_theta", None)
    if kind == "default" and not values:
        return base, None
    if kind != "llama3":
        raise CheckpointError(f"{fields.where}: rope_type={kind!r} with {values} is not built; default and llama3 are")
    lacking = [name for name in _LLAMA3.values() if name not in values]
    foreign = [name for name in values if name not in _LLAMA3.values()]
    if lacking or foreign:
        raise CheckpointError(f"{fields.where}: rope_scaling lacks {lacking} and has unknown {foreign}")
    return base, {ours: values[theirs] for ours, theirs in _LLAMA3.items()}


def written_rotary(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the rotary positions, as versions before and from 5 read them."""
    base, scaling = cfg["rotary_base"], cfg["rotary_scaling"]
    if scaling is None:
        return {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
    given = {theirs: scaling[ours] for ours, theirs in _LLAMA3.items()}
    return {
        "rope_theta": base,
        "rope_scaling": {"rope_type": "llama3", **given},
        "rope_parameters": {"rope_type": "llama3", "rope_theta": base, **given},
    }


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    for name in ("attention_bias", "mlp_bias"):
        fields.expect(name, False)
    fields.expect("pretraining_tp", 1)  # other values compute the same in another order
    base, scaling = rotary(fields)
    heads = fields.whole("num_attention_heads", 32)
    hidden = fields.whole("hidden_size", 4096)
    return TARGET, {
        "vocab_size": fields.whole("vocab_size", 32000),
        "hidden_layers": fields.whole("num_hidden_layers", 32),
        "hidden_size": hidden,
        "ffn_hidden_size": fields.whole("intermediate_size", 11008),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("num_key_value_heads", heads),
        "head_size": fields.whole("head_dim", hidden // heads),
        "max_seq_length": fields.whole("max_position_embeddings", 2048),
        "attention_dropout_prob": fields.take("attention_dropout", 0.0),
        "layernorm_epsilon": fields.take("rms_norm_eps", 1e-6),
        "initializer_range": fields.take("initializer_range", 0.02),
        "activation": fields.activation("hidden_act", "silu"),
        "rotary_base": base,
        "rotary_scaling": scaling,
        "tie_word_embeddings": fields.take("tie_word_embeddings", False),
    }


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family. Dropout on the embedding and the branches is of training alone; Hugging Face's Llama has none."""
    refuse_unless(cfg, "llama", num_experts=0)
    heads = cfg["num_attention_heads"]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": cfg["vocab_size"],
        "num_hidden_layers": cfg["hidden_layers"],
        "hidden_size": cfg["hidden_size"],
        "intermediate_size": inner(cfg),
        "num_attention_heads": heads,
        "num_key_value_heads": cfg["num_key_value_heads"] or heads,
        "head_dim": head_size(cfg),
        "max_position_embeddings": cfg["max_seq_length"],
        "attention_dropout": cfg["attention_dropout_prob"],
        "rms_norm_eps": cfg["layernorm_epsilon"],
        "initializer_range": cfg["initializer_range"],
        "hidden_act": activation_name(cfg["activation"]),
        "attention_bias": False,
        "mlp_bias": False,
        **written_rotary(cfg),
        "tie_word_embeddings": cfg["tie_word_embeddings"],
    }


def inner(cfg: Mapping[str, Any]) -> int:
    """Return the inner width of the feed-forward part."""
    from dufu.models.llama.model import inner_width

    return int(cfg["ffn_hidden_size"] or inner_width(cfg["hidden_size"]))


def head_size(cfg: Mapping[str, Any]) -> int:
    """Return the features of a head."""
    return int(cfg["head_size"] or cfg["hidden_size"] // cfg["num_attention_heads"])


def attention_rules(number: int, cfg: Mapping[str, Any], leaf: str = "weight") -> list[Rule]:
    """Return the rule of a layer's fused query, key and value."""
    size, heads = head_size(cfg), cfg["num_attention_heads"]
    kv = (cfg["num_key_value_heads"] or heads) * size
    theirs = f"model.layers.{number}.self_attn"
    rows = [(f"{theirs}.q_proj.{leaf}", heads * size), (f"{theirs}.k_proj.{leaf}", kv), (f"{theirs}.v_proj.{leaf}", kv)]
    return [joined(f"layers.{number}.block.attention.query_key_value.{leaf}", rows)]


def layer_rules(number: int, cfg: Mapping[str, Any]) -> Sequence[Rule]:
    """Return the rules of a dense layer without biases."""
    ours, theirs, width = f"layers.{number}.block", f"model.layers.{number}", inner(cfg)
    gate_up = [(f"{theirs}.mlp.gate_proj.weight", width), (f"{theirs}.mlp.up_proj.weight", width)]
    return [
        same(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight"),
        *attention_rules(number, cfg),
        same(f"{ours}.attention.output.weight", f"{theirs}.self_attn.o_proj.weight"),
        same(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight"),
        joined(f"{ours}.mlp.gate_up.weight", gate_up),
        same(f"{ours}.mlp.contract.weight", f"{theirs}.mlp.down_proj.weight"),
    ]


def around(cfg: Mapping[str, Any], layers: Sequence[Rule]) -> Table:
    """Return the table of a Llama-like model whose layers have the given rules."""
    tied = cfg["tie_word_embeddings"]
    return Table(
        rules=(
            same("embedding.word.weight", "model.embed_tokens.weight"),
            *layers,
            same("head.norm.weight", "model.norm.weight"),
            *(() if tied else (same("head.word.weight", "lm_head.weight"),)),
        ),
        ignored=(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"(model\.)?rotary_emb\.inv_freq"),
        copies={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
        prefix="model.",
    )


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family."""
    return around(cfg, list(each(cfg["hidden_layers"], lambda number: layer_rules(number, cfg))))


FAMILY = Family((TARGET,), read, write, table)
