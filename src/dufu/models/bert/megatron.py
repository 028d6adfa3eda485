"""Hugging Face's MegatronBert: BERT with the norms before each branch (Shoeybi et al., 2019), our `apply_residual_post_layernorm=False`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dufu.errors import CheckpointError
from dufu.models.bert import hf
from dufu.models.hf import Family, Fields, refuse_unless
from dufu.models.names import Rule, Table, each, joined, same

_HEADS = {
    "MegatronBertForPreTraining": hf.PRETRAINING, "MegatronBertForMaskedLM": hf.PRETRAINING, "MegatronBertModel": hf.FEATURES,
    "MegatronBertForSequenceClassification": hf.CLASSIFIER, "": hf.FEATURES,
}  # fmt: skip


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    cfg = {**hf.encoder_fields(fields), "apply_residual_post_layernorm": False}
    kind = fields.architecture
    if kind not in _HEADS:
        raise CheckpointError(f"{fields.where}: architectures={kind} is not built; {', '.join(filter(None, _HEADS))} are")
    target = _HEADS[kind]
    if target == hf.CLASSIFIER:
        return target, {**cfg, **hf.classifier_fields(fields, "hidden_dropout_prob")}
    if target == hf.FEATURES:
        return target, cfg
    return target, {**cfg, "sentence_objective": kind == "MegatronBertForPreTraining"}


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family."""
    common = hf.written_encoder({**cfg, "apply_residual_post_layernorm": True}, "megatron-bert")
    if target == hf.CLASSIFIER:
        refuse_unless(cfg, "megatron-bert", classifier_dropout_prob=cfg["embedding_dropout_prob"])
        fields = hf.written_classifier(cfg, "hidden_dropout_prob")
        return {**common, **fields, "architectures": ["MegatronBertForSequenceClassification"]}
    if target == hf.FEATURES:
        return {**common, "architectures": ["MegatronBertModel"]}
    return {**common, "architectures": ["MegatronBertForPreTraining" if cfg["sentence_objective"] else "MegatronBertForMaskedLM"]}


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family."""
    prefix, hidden = "" if target == hf.FEATURES else "bert.", cfg["hidden_size"]
    tables = f"{prefix}embeddings"

    def layer(number: int) -> Sequence[Rule]:
        ours, theirs = f"layers.{number}.block", f"{prefix}encoder.layer.{number}"
        kinds = [f"{theirs}.attention.self.{kind}" for kind in ("query", "key", "value")]
        return [
            *(joined(f"{ours}.attention.query_key_value.{leaf}", [(f"{k}.{leaf}", hidden) for k in kinds]) for leaf in hf.LEAVES),
            *hf.linear(f"{ours}.attention.output", f"{theirs}.attention.output.dense"),
            *hf.linear(f"{ours}.attention_norm", f"{theirs}.attention.ln"),
            *hf.linear(f"{ours}.mlp.expand", f"{theirs}.intermediate.dense"),
            *hf.linear(f"{ours}.mlp.contract", f"{theirs}.output.dense"),
            *hf.linear(f"{ours}.mlp_norm", f"{theirs}.ln"),
        ]

    rules = [
        same("embedding.word.weight", f"{tables}.word_embeddings.weight"),
        same("embedding.position.weight", f"{tables}.position_embeddings.weight"),
        same("embedding.token_type.weight", f"{tables}.token_type_embeddings.weight"),
        *each(cfg["hidden_layers"], layer),
        *hf.linear("head.norm", f"{prefix}encoder.ln"),
    ]
    head, copies = hf.head_rules(target, cfg)
    return Table(tuple(rules + head), (r"(bert\.)?embeddings\.(position_ids|token_type_ids)",), copies, "bert.", hf.OLD_NAMES)


FAMILY = Family((hf.PRETRAINING, hf.CLASSIFIER, hf.FEATURES), read, write, table)
