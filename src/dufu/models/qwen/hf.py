"""The config.json files and weights of Qwen 2, 2.5 and 3, dense and with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.errors import CheckpointError
from dufu.models.hf import Family, Fields
from dufu.models.names import Rule, Table, same
from dufu.models.rotary_hf import (
    attention_rules,
    decoder_table,
    gated_rules,
    mixture_rules,
    shared_arguments,
    shared_fields,
)  # fmt: skip

HOME = "dufu.models.qwen."
# model_type → our class and theirs
KINDS = {
    "qwen2": ("Qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3", "Qwen3ForCausalLM"),
    "qwen2_moe": ("Qwen2Moe", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("Qwen3Moe", "Qwen3MoeForCausalLM"),
}


def _kind(target: str) -> str:
    return next(kind for kind, (ours, _) in KINDS.items() if HOME + ours == target)


def _layer_types(layers: int, window: int | None, first: int) -> list[str]:
    return ["full_attention" if window is None or i < first else "sliding_attention" for i in range(layers)]


def _windows(fields: Fields, layers: int) -> dict[str, Any]:
    """Return our arguments of the windows; they begin at one layer and reach to the last."""
    used, window = fields.take("use_sliding_window", False), fields.take("sliding_window", None)
    first, kinds = fields.take("max_window_layers", 28), fields.take("layer_types", None)
    window = window if used and window else None
    if kinds is not None and list(kinds) != _layer_types(layers, window, first):
        first = list(kinds).count("full_attention")
        if list(kinds) != _layer_types(layers, window, first):
            raise CheckpointError(
                f"{fields.where}: layer_types={kinds} with sliding_window={window} is not built; windows begin at one layer and reach "
                f"to the last"
            )
    return {"sliding_window": window, "max_window_layers": first}


def _mixture(fields: Fields, layers: int) -> dict[str, Any]:
    for name, value in (("decoder_sparse_step", 1), ("output_router_logits", False), ("use_sliding_window", False)):
        fields.expect(name, value)
    fields.expect("layer_types", ["full_attention"] * layers)
    fields.ignore("sliding_window", "max_window_layers")
    dense, width = fields.take("mlp_only_layers", []), fields.whole("moe_intermediate_size")
    if list(dense) != list(range(len(dense))):
        raise CheckpointError(f"{fields.where}: mlp_only_layers={dense} is not built; dense layers are the first ones")
    shared = fields.take("shared_expert_intermediate_size", 0)
    if shared % width:
        raise CheckpointError(
            f"{fields.where}: shared_expert_intermediate_size={shared} is no multiple of moe_intermediate_size={width}, which is not built"
        )
    return {
        "num_experts": fields.whole("num_experts", ..., "num_local_experts"),
        "moe_top_k": fields.whole("num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "moe_shared_experts": shared // width,
        "moe_renormalize": fields.take("norm_topk_prob", False),
        "moe_first_dense_layers": len(dense),
        "moe_balance_weight": fields.take("router_aux_loss_coef", 0.001),
    }


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    kind = fields.values["model_type"]
    fields.expect("attention_bias", False)  # of Qwen 3
    fields.expect("qkv_bias", True)  # of Qwen 2
    fields.expect("use_mrope", False)
    # Qwen 3 alone has heads whose size follows from nothing; its mixtures' default is the usual one.
    cfg = shared_arguments(fields, max_length=32768, head_dim=128 if kind == "qwen3" else None)
    more = _mixture if kind.endswith("_moe") else _windows
    return HOME + KINDS[kind][0], {**cfg, **more(fields, cfg["hidden_layers"])}


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family. Dropout on embedding and branches, and the router's z-loss, are of training alone."""
    kind = _kind(target)
    found = shared_fields(cfg, kind, KINDS[kind][1])
    found.update({"qkv_bias": True} if kind == "qwen2_moe" else {"attention_bias": False} if "qwen3" in kind else {})
    if not kind.endswith("_moe"):
        window, first = cfg["sliding_window"], cfg["max_window_layers"]
        return {
            **found,
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": first,
            "layer_types": _layer_types(cfg["hidden_layers"], window, first),
        }
    shared = {"shared_expert_intermediate_size": cfg["moe_shared_experts"] * cfg["moe_ffn_hidden_size"]}
    return {
        **found,
        "num_experts": cfg["num_experts"],
        "num_experts_per_tok": cfg["moe_top_k"],
        "moe_intermediate_size": cfg["moe_ffn_hidden_size"],
        "norm_topk_prob": cfg["moe_renormalize"],
        "mlp_only_layers": list(range(cfg["moe_first_dense_layers"])),
        "decoder_sparse_step": 1,
        "router_aux_loss_coef": cfg["moe_balance_weight"],
        "use_sliding_window": False,
        **(shared if kind == "qwen2_moe" else {}),
    }


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family."""
    second = _kind(target).startswith("qwen2")

    def feed_forward(number: int) -> list[Rule]:
        ours, theirs = f"layers.{number}.block.mlp", f"model.layers.{number}.mlp"
        if number < cfg.get("moe_first_dense_layers", number + 1):
            return gated_rules(ours, theirs, cfg["ffn_hidden_size"])
        width = cfg["moe_ffn_hidden_size"]
        rules = mixture_rules(ours, theirs, cfg, width, ("gate_proj", "up_proj", "down_proj"))
        if cfg["moe_shared_experts"]:
            rules += gated_rules(f"{ours}.shared", f"{theirs}.shared_expert", width * cfg["moe_shared_experts"])
            rules.append(same(f"{ours}.shared_gate.weight", f"{theirs}.shared_expert_gate.weight"))
        return rules

    return decoder_table(cfg, lambda number: attention_rules(number, cfg, bias=second, head_norm=not second), feed_forward)


FAMILY = Family(tuple(HOME + ours for ours, _ in KINDS.values()), read, write, table)
