"""Mistral's config.json and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.models.hf import Family, Fields
from dufu.models.names import Table
from dufu.models.rotary_hf import attention_rules, decoder_table, shared_arguments, shared_fields

TARGET = "dufu.models.mistral.Mistral"


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    # A file that says null means no window, one that says nothing Mistral 7B's first one.
    window = fields.take("sliding_window", None if "sliding_window" in fields.values else 4096)
    return TARGET, {**shared_arguments(fields, max_length=131072), "sliding_window": window}


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family."""
    return {**shared_fields(cfg, "mistral", "MistralForCausalLM"), "sliding_window": cfg["sliding_window"]}


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family."""
    return decoder_table(cfg, lambda number: attention_rules(number, cfg))


FAMILY = Family((TARGET,), read, write, table)
