"""What the config.json files and the weights of Llama and its likes share in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dufu.errors import CheckpointError
from dufu.layers.rotary import SCALINGS, build_scaling
from dufu.models.hf import Fields, activation_name
from dufu.models.names import Rule, Table, each, experts, joined, pairwise, same

# kind → our argument: their field, and whether a file must say it
_SCALINGS: dict[str, dict[str, tuple[str, bool]]] = {
    "llama3": {
        "factor": ("factor", True), "low_freq_factor": ("low_freq_factor", True), "high_freq_factor": ("high_freq_factor", True),
        "original_length": ("original_max_position_embeddings", True),
    },
    "linear": {"factor": ("factor", True)},
    "yarn": {
        "factor": ("factor", True), "original_length": ("original_max_position_embeddings", True), "beta_fast": ("beta_fast", False),
        "beta_slow": ("beta_slow", False), "attention_factor": ("attention_factor", False), "truncate": ("truncate", False),
    },
}  # fmt: skip


def rotary(fields: Fields, base: float = 10000.0, share: float | None = None) -> dict[str, Any]:
    """Return base and scaling of the rotary positions, from a file of any version, as arguments of our models.

    Args:
        base: what a file means that does not say.
        share: the same of the rotated features' share of a head, where the family has it (`partial_rotary_factor`).

    Raises:
        CheckpointError: a kind of scaling that is not built, or one that lacks a number.
    """
    values = dict(fields.take("rope_parameters", {}) or {})
    values.update(fields.take("rope_scaling", {}) or {})
    found: dict[str, Any] = {"rotary_base": float(fields.take("rope_theta", values.pop("rope_theta", base)))}
    values.pop("rope_theta", None)
    inner = values.pop("partial_rotary_factor", share)
    if share is not None:
        found["partial_rotary_factor"] = float(fields.take("partial_rotary_factor", inner))
    elif inner not in (None, 1.0):
        raise CheckpointError(f"{fields.where}: partial_rotary_factor={inner} is not built in this family; dufu computes 1.0")
    kind = values.pop("rope_type", None) or values.get("type", "default")
    values.pop("type", None)
    given = {name: value for name, value in values.items() if value is not None}
    if kind == "default" and not given:
        return {**found, "rotary_scaling": None}
    if kind not in _SCALINGS:
        raise CheckpointError(f"{fields.where}: rope_type={kind!r} with {given} is not built; default, {', '.join(_SCALINGS)} are")
    names = _SCALINGS[kind]
    lacking = [theirs for theirs, needed in names.values() if needed and theirs not in given]
    foreign = sorted(set(given) - {theirs for theirs, _ in names.values()})
    if lacking or foreign:
        raise CheckpointError(f"{fields.where}: rope_type={kind!r} lacks {lacking} and has unknown {foreign}")
    scaling = {ours: given[theirs] for ours, (theirs, _) in names.items() if theirs in given}
    return {**found, "rotary_scaling": scaling if kind == "llama3" else {"kind": kind, **scaling}}


def written_rotary(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the rotary positions, as versions before and from 5 read them."""
    base, scaling = cfg["rotary_base"], build_scaling(cfg["rotary_scaling"])
    kind = next((name for name, made in SCALINGS.items() if type(scaling) is made), "default")
    given: dict[str, Any] = {}
    if scaling is not None:  # with the defaults of what the model's arguments leave out
        numbers = {theirs: getattr(scaling, ours) for ours, (theirs, _) in _SCALINGS[kind].items()}
        given = {name: value for name, value in numbers.items() if value is not None}
    share = {"partial_rotary_factor": cfg["partial_rotary_factor"]} if "partial_rotary_factor" in cfg else {}
    fields: dict[str, Any] = {"rope_theta": base, **share}
    if given:
        fields["rope_scaling"] = {"rope_type": kind, **given}
    return {**fields, "rope_parameters": {"rope_type": kind, "rope_theta": base, **share, **given}}


def shared_arguments(
    fields: Fields, *, max_length: int, epsilon: float = 1e-6, base: float = 10000.0, activation: str = "silu", tied: bool = False,
    share: float | None = None, head_dim: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments that all of these models have.

    Args:
        fields: of config.json.
        max_length, epsilon, base, activation, tied, share, head_dim: what a file means that does not say.
    """
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    fields.expect("mlp_bias", False)
    return {
        "vocab_size": fields.whole("vocab_size"),
        "hidden_layers": fields.whole("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": fields.whole("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("num_key_value_heads", heads),
        "head_size": fields.whole("head_dim", head_dim or hidden // heads),
        "max_seq_length": fields.whole("max_position_embeddings", max_length),
        "attention_dropout_prob": fields.take("attention_dropout", 0.0),
        "layernorm_epsilon": fields.take("rms_norm_eps", epsilon),
        "initializer_range": fields.take("initializer_range", 0.02),
        "activation": fields.activation("hidden_act", activation),
        **rotary(fields, base, share),
        "tie_word_embeddings": fields.take("tie_word_embeddings", tied),
    }


def shared_fields(cfg: Mapping[str, Any], kind: str, architecture: str) -> dict[str, Any]:
    """Return the fields that all of these models have. Dropout on the embedding and the branches is of training alone."""
    return {
        "model_type": kind,
        "architectures": [architecture],
        "vocab_size": cfg["vocab_size"],
        "num_hidden_layers": cfg["hidden_layers"],
        "hidden_size": cfg["hidden_size"],
        "intermediate_size": cfg["ffn_hidden_size"],
        "num_attention_heads": cfg["num_attention_heads"],
        "num_key_value_heads": cfg["num_key_value_heads"] or cfg["num_attention_heads"],
        "head_dim": head_size(cfg),
        "max_position_embeddings": cfg["max_seq_length"],
        "attention_dropout": cfg["attention_dropout_prob"],
        "rms_norm_eps": cfg["layernorm_epsilon"],
        "initializer_range": cfg["initializer_range"],
        "hidden_act": activation_name(cfg["activation"]),
        **written_rotary(cfg),
        "tie_word_embeddings": cfg["tie_word_embeddings"],
    }


def head_size(cfg: Mapping[str, Any]) -> int:
    """Return the features of a head."""
    return int(cfg["head_size"] or cfg["hidden_size"] // cfg["num_attention_heads"])


def attention_rules(
    number: int, cfg: Mapping[str, Any], *, bias: bool = False, head_norm: bool = False, paired: int | None = None
) -> list[Rule]:
    """Return the rules of a layer's attention.

    Args:
        number: of the layer.
        cfg: the model's arguments.
        bias: whether query, key and value have biases.
        head_norm: whether queries and keys are normed.
        paired: how many features of a head are rotated in pairs that lie side by side there; None = as here.
    """
    size, heads = head_size(cfg), cfg["num_attention_heads"]
    kv_heads = cfg["num_key_value_heads"] or heads
    ours, theirs = f"layers.{number}.block.attention", f"model.layers.{number}.self_attn"
    rules = []
    for leaf in ("weight", "bias") if bias else ("weight",):
        fused, names = f"{ours}.query_key_value.{leaf}", [f"{theirs}.{part}_proj.{leaf}" for part in "qkv"]
        rows = (heads * size, kv_heads * size, kv_heads * size)
        rule = joined(fused, list(zip(names, rows)))
        if paired is not None:
            queries = pairwise(fused, names[0], heads, size, paired)
            keys = pairwise(fused, names[1], kv_heads, size, paired, rows[0])
            rule = Rule(fused, (*queries, *keys, rule.parts[2]))
        rules.append(rule)
    if head_norm:
        rules += [same(f"{ours}.{a}_norm.weight", f"{theirs}.{b}_norm.weight") for a, b in (("query", "q"), ("key", "k"))]
    return [*rules, same(f"{ours}.output.weight", f"{theirs}.o_proj.weight")]


def gated_rules(ours: str, theirs: str, width: int) -> list[Rule]:
    """Return the rules of a gated feed-forward part whose gate is a tensor of its own."""
    return [
        joined(f"{ours}.gate_up.weight", [(f"{theirs}.gate_proj.weight", width), (f"{theirs}.up_proj.weight", width)]),
        same(f"{ours}.contract.weight", f"{theirs}.down_proj.weight"),
    ]


def mixture_rules(ours: str, theirs: str, cfg: Mapping[str, Any], width: int, names: tuple[str, str, str]) -> list[Rule]:
    """Return the rules of a mixture whose experts are tensors of their own.

    Args:
        ours, theirs: names of the mixture.
        cfg: the model's arguments.
        width: inner width of an expert.
        names: their names of gate, up and down.
    """
    gate, up, down = ([f"{theirs}.experts.{i}.{name}.weight" for i in range(cfg["num_experts"])] for name in names)
    return [
        same(f"{ours}.router.weight", f"{theirs}.gate.weight"),
        experts(f"{ours}.experts.expand", list(zip(gate, up)), (width, cfg["hidden_size"])),
        experts(f"{ours}.experts.contract", [(name,) for name in down], (width, cfg["hidden_size"]), transposed=True),
    ]


def decoder_table(
    cfg: Mapping[str, Any],
    attention: Callable[[int], Sequence[Rule]],
    feed_forward: Callable[[int], Sequence[Rule]] | None = None,
    norms: Sequence[tuple[str, str]] = (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")),
) -> Table:
    """Return the table of a whole model.

    Args:
        cfg: its arguments.
        attention, feed_forward: the rules of a layer's two parts, by its number; None = those of `gated_rules`.
        norms: ours and theirs of a layer.
    """

    def layer(number: int) -> list[Rule]:
        ours, theirs = f"layers.{number}.block", f"model.layers.{number}"
        return [
            *(same(f"{ours}.{a}.weight", f"{theirs}.{b}.weight") for a, b in norms),
            *attention(number),
            *(feed_forward(number) if feed_forward else gated_rules(f"{ours}.mlp", f"{theirs}.mlp", cfg["ffn_hidden_size"])),
        ]

    tied = cfg["tie_word_embeddings"]
    return Table(
        rules=(
            same("embedding.word.weight", "model.embed_tokens.weight"),
            *each(cfg["hidden_layers"], layer),
            same("head.norm.weight", "model.norm.weight"),
            *(() if tied else (same("head.word.weight", "lm_head.weight"),)),
        ),
        ignored=(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"(model\.)?rotary_emb\.inv_freq"),
        copies={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
        prefix="model.",
    )
