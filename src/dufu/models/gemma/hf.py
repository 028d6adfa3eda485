"""Gemma's config.json and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.models.hf import Family, Fields
from dufu.models.names import Table
from dufu.models.rotary_hf import attention_rules, decoder_table, shared_arguments, shared_fields

TARGET = "dufu.models.gemma.Gemma"


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    fields.expect("attention_bias", False)
    fields.expect("use_bidirectional_attention", None, False)
    fields.expect("hidden_activation", None, "gelu_pytorch_tanh")
    cfg = shared_arguments(fields, max_length=8192, activation="gelu_pytorch_tanh", tied=True, head_dim=256)
    # The first files say "gelu", and mean its approximation, as everybody computes it.
    activation = "gelu_tanh" if cfg["activation"] == "gelu" else cfg["activation"]
    return TARGET, {**cfg, "activation": activation}


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family."""
    return {**shared_fields(cfg, "gemma", "GemmaForCausalLM"), "attention_bias": False}


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family."""
    return decoder_table(cfg, lambda number: attention_rules(number, cfg))


FAMILY = Family((TARGET,), read, write, table)
