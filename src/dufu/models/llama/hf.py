"""Llama's config.json and weights (Llama 1 to 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.models.hf import Family, Fields, refuse_unless
from dufu.models.llama.model import inner_width
from dufu.models.names import Table
from dufu.models.rotary_hf import attention_rules, decoder_table, shared_arguments, shared_fields

TARGET = "dufu.models.llama.Llama"


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    fields.expect("attention_bias", False)
    fields.expect("pretraining_tp", 1)  # other values compute the same in another order
    return TARGET, shared_arguments(fields, max_length=2048)


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family. Dropout on the embedding and the branches is of training alone; Hugging Face's Llama has none."""
    refuse_unless(cfg, "llama", num_experts=0)
    return {**shared_fields(_with_width(cfg), "llama", "LlamaForCausalLM"), "attention_bias": False, "mlp_bias": False}


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family."""
    return decoder_table(_with_width(cfg), lambda number: attention_rules(number, cfg))


def _with_width(cfg: Mapping[str, Any]) -> dict[str, Any]:
    return {**cfg, "ffn_hidden_size": cfg["ffn_hidden_size"] or inner_width(cfg["hidden_size"])}


FAMILY = Family((TARGET,), read, write, table)
