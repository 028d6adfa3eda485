"""ALBERT's config.json and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dufu.errors import CheckpointError
from dufu.models.bert.hf import LEAVES, OLD_NAMES, encoder_fields, linear, written_encoder
from dufu.models.hf import Family, Fields
from dufu.models.names import Rule, Table, each, joined, same

TARGET = "dufu.models.albert.Albert"


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    cfg = encoder_fields(fields)
    fields.expect("inner_group_num", 1)
    for name in ("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks", "layers_to_keep"):
        fields.ignore(name)
    kind = fields.architecture
    if kind not in ("AlbertForPreTraining", "AlbertForMaskedLM"):
        raise CheckpointError(f"{fields.where}: architectures={kind} is not built; AlbertForPreTraining and AlbertForMaskedLM are")
    if cfg["hidden_size"] == (size := fields.whole("embedding_size", 128)):
        raise CheckpointError(f"{fields.where}: embedding_size={size} equals hidden_size; only a narrower embedding is built")
    return TARGET, {
        **cfg,
        "embedding_size": size,
        "num_hidden_groups": fields.whole("num_hidden_groups", 1),
        "classifier_dropout_prob": fields.take("classifier_dropout_prob", 0.1),
        "sentence_objective": kind == "AlbertForPreTraining",
    }


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family."""
    return {
        **written_encoder({**cfg, "apply_residual_post_layernorm": True}, "albert"),
        "architectures": ["AlbertForPreTraining" if cfg["sentence_objective"] else "AlbertForMaskedLM"],
        "embedding_size": cfg["embedding_size"],
        "num_hidden_groups": cfg["num_hidden_groups"],
        "inner_group_num": 1,
        "classifier_dropout_prob": cfg["classifier_dropout_prob"],
    }


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family. A group's weights have the name of the first layer that uses them."""
    hidden, layers, groups = cfg["hidden_size"], cfg["hidden_layers"], cfg["num_hidden_groups"]

    def group(number: int) -> Sequence[Rule]:
        first = -(-number * layers // groups)
        ours, theirs = f"layers.{first}.block", f"albert.encoder.albert_layer_groups.{number}.albert_layers.0"
        fused = [
            joined(
                f"{ours}.attention.query_key_value.{leaf}",
                [(f"{theirs}.attention.{kind}.{leaf}", hidden) for kind in ("query", "key", "value")],
            )
            for leaf in LEAVES
        ]
        return [
            *fused,
            *linear(f"{ours}.attention.output", f"{theirs}.attention.dense"),
            *linear(f"{ours}.attention_norm", f"{theirs}.attention.LayerNorm"),
            *linear(f"{ours}.mlp.expand", f"{theirs}.ffn"),
            *linear(f"{ours}.mlp.contract", f"{theirs}.ffn_output"),
            *linear(f"{ours}.mlp_norm", f"{theirs}.full_layer_layer_norm"),
        ]

    tables = "albert.embeddings"
    sentence = [*linear("head.pooler.dense", "albert.pooler"), *linear("head.sentence", "sop_classifier.classifier")]
    rules = [
        same("embedding.word.weight", f"{tables}.word_embeddings.weight"),
        same("embedding.position.weight", f"{tables}.position_embeddings.weight"),
        same("embedding.token_type.weight", f"{tables}.token_type_embeddings.weight"),
        *linear("embedding.norm", f"{tables}.LayerNorm"),
        *linear("embedding.widen", "albert.encoder.embedding_hidden_mapping_in"),
        *each(groups, group),
        *linear("head.transform", "predictions.dense"),
        *linear("head.transform_norm", "predictions.LayerNorm"),
        same("head.logits.bias", "predictions.bias"),
        *(sentence if cfg["sentence_objective"] else []),
    ]
    copies = {"predictions.decoder.weight": f"{tables}.word_embeddings.weight", "predictions.decoder.bias": "predictions.bias"}
    spare = () if cfg["sentence_objective"] else (r"albert\.pooler\..*", r"sop_classifier\..*")
    return Table(tuple(rules), (r"albert\.embeddings\.(position_ids|token_type_ids)",), copies, "", OLD_NAMES, spare=spare)


FAMILY = Family((TARGET,), read, write, table)
