"""Mixtral's config.json and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.errors import CheckpointError
from dufu.models.hf import Family, Fields
from dufu.models.names import Rule, Table
from dufu.models.rotary_hf import attention_rules, decoder_table, mixture_rules, shared_arguments, shared_fields

TARGET = "dufu.models.mixtral.Mixtral"


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    fields.expect("router_jitter_noise", 0.0)
    fields.expect("output_router_logits", False)
    if fields.take("num_experts_per_tok", 2) == 1:
        raise CheckpointError(
            f"{fields.where}: num_experts_per_tok=1 gives the one expert a weight of 1, whatever the router says; not built"
        )
    return TARGET, {
        **shared_arguments(fields, max_length=131072, epsilon=1e-5, base=1000000.0),
        "sliding_window": fields.take("sliding_window", None),
        "num_experts": fields.whole("num_local_experts", 8, "num_experts"),
        "moe_top_k": fields.whole("num_experts_per_tok", 2),
        "moe_balance_weight": fields.take("router_aux_loss_coef", 0.001),
    }


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family. Dropout on embedding and branches, and the router's z-loss, are of training alone."""
    return {
        **shared_fields(cfg, "mixtral", "MixtralForCausalLM"),
        "sliding_window": cfg["sliding_window"],
        "num_local_experts": cfg["num_experts"],
        "num_experts_per_tok": cfg["moe_top_k"],
        "router_aux_loss_coef": cfg["moe_balance_weight"],
    }


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family."""

    def feed_forward(number: int) -> list[Rule]:
        theirs = f"model.layers.{number}.block_sparse_moe"
        return mixture_rules(f"layers.{number}.block.mlp", theirs, cfg, cfg["ffn_hidden_size"], ("w1", "w3", "w2"))

    return decoder_table(cfg, lambda number: attention_rules(number, cfg), feed_forward)


FAMILY = Family((TARGET,), read, write, table)
