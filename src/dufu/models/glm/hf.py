"""GLM's config.json and weights: `glm` (GLM-4) and `glm4` (GLM-4-0414). ChatGLM's own format is another family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.models.hf import Family, Fields
from dufu.models.names import Rule, Table, same
from dufu.models.rotary_hf import attention_rules, decoder_table, head_size, shared_arguments, shared_fields

PADDING = 151329  # the padding token where a file says nothing
# model_type → our class and theirs
KINDS = {"glm": ("dufu.models.glm.Glm", "GlmForCausalLM"), "glm4": ("dufu.models.glm.Glm4", "Glm4ForCausalLM")}
NORMS = {
    "glm": (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")),
    "glm4": (
        ("attention_norm", "input_layernorm"), ("attention_branch_norm", "post_self_attn_layernorm"),
        ("mlp_norm", "post_attention_layernorm"), ("mlp_branch_norm", "post_mlp_layernorm"),
    ),
}  # fmt: skip


def _kind(target: str) -> str:
    return next(kind for kind, (ours, _) in KINDS.items() if ours == target)


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    cfg = shared_arguments(fields, max_length=131072, epsilon=1.5625e-07, share=0.5, head_dim=128)
    return KINDS[fields.values["model_type"]][0], {**cfg, "qkv_bias": fields.take("attention_bias", True)}


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family."""
    kind = _kind(target)
    # Of a smaller vocabulary theirs would take a padding token that is no row of it.
    padding = {"pad_token_id": None} if cfg["vocab_size"] <= PADDING else {}
    return {**shared_fields(cfg, kind, KINDS[kind][1]), "attention_bias": cfg["qkv_bias"], **padding}


def rotated_features(cfg: Mapping[str, Any]) -> int:
    """Return how many features of a head are rotated."""
    return int(head_size(cfg) * cfg["partial_rotary_factor"])


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family. GLM rotates pairs of features that lie side by side; ours lie half of the rotated features apart."""

    def feed_forward(number: int) -> list[Rule]:
        ours, theirs = f"layers.{number}.block.mlp", f"model.layers.{number}.mlp"
        return [
            same(f"{ours}.gate_up.weight", f"{theirs}.gate_up_proj.weight"),
            same(f"{ours}.contract.weight", f"{theirs}.down_proj.weight"),
        ]

    def attention(number: int) -> list[Rule]:
        return attention_rules(number, cfg, bias=cfg["qkv_bias"], paired=rotated_features(cfg))

    return decoder_table(cfg, attention, feed_forward, NORMS[_kind(target)])


FAMILY = Family(tuple(ours for ours, _ in KINDS.values()), read, write, table)
