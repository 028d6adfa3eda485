"""RoBERTa's config.json and weights; XLM-R's are the same with another vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.errors import CheckpointError
from dufu.models.bert.hf import (
    OLD_NAMES,
    classifier_fields,
    encoder_fields,
    encoder_rules,
    linear,
    written_classifier,
    written_encoder,
)
from dufu.models.hf import Family, Fields, refuse_unless
from dufu.models.names import Table, same
from dufu.models.roberta.model import OFFSET

PACKAGE = "dufu.models.roberta"
PRETRAINING, CLASSIFIER, FEATURES = f"{PACKAGE}.Roberta", f"{PACKAGE}.RobertaClassifier", f"{PACKAGE}.RobertaFeatures"
# Names of the classes after the family's own, "Roberta" or "XLMRoberta".
_HEADS = {"ForMaskedLM": PRETRAINING, "ForSequenceClassification": CLASSIFIER, "Model": FEATURES, "": FEATURES}


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    padding = fields.values.get("pad_token_id", 1)
    if padding != OFFSET - 1:
        raise CheckpointError(
            f"{fields.where}: pad_token_id={padding} decides where the position table begins; only {OFFSET - 1} is built"
        )
    cfg = encoder_fields(fields, OFFSET)
    fields.ignore("classifier_dropout")
    kind = fields.architecture.removeprefix("XLM").removeprefix("Roberta")
    if kind not in _HEADS:
        known = ", ".join(f"Roberta{name}" for name in _HEADS if name)
        raise CheckpointError(f"{fields.where}: architectures={fields.architecture} is not built; {known} are")
    target = _HEADS[kind]
    if target == CLASSIFIER:
        return target, {**cfg, **classifier_fields(fields)}
    return target, {**cfg, "sentence_objective": False} if target == PRETRAINING else cfg


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family."""
    common = {**written_encoder(cfg, "roberta", OFFSET), "pad_token_id": OFFSET - 1}
    if target == CLASSIFIER:
        return {**common, "architectures": ["RobertaForSequenceClassification"], **written_classifier(cfg)}
    if target == FEATURES:
        return {**common, "architectures": ["RobertaModel"]}
    refuse_unless(cfg, "roberta", sentence_objective=False)
    if cfg["activation"] != "gelu":  # of the head; their class computes no other there
        refuse_unless(cfg, "roberta", activation="gelu")
    return {**common, "architectures": ["RobertaForMaskedLM"]}


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family."""
    prefix = "" if target == FEATURES else "roberta."
    rules, copies = encoder_rules(cfg, prefix), {}
    if target == FEATURES:
        rules += linear("head.pooler.dense", "pooler.dense") if cfg["pooler"] else []
    elif target == CLASSIFIER:
        rules += [*linear("head.pooler.dense", "classifier.dense"), *linear("head.classes", "classifier.out_proj")]
    else:
        rules += [
            *linear("head.transform", "lm_head.dense"),
            *linear("head.transform_norm", "lm_head.layer_norm"),
            same("head.logits.bias", "lm_head.bias"),
        ]
        copies = {"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"}
    spare = {PRETRAINING: (r"roberta\.pooler\..*",), FEATURES: (r"lm_head\..*",)}.get(target, ())
    ignored = (r"(roberta\.)?embeddings\.(position_ids|token_type_ids)",)
    return Table(tuple(rules), ignored, copies, "roberta.", OLD_NAMES, spare=spare)


FAMILY = Family((PRETRAINING, CLASSIFIER, FEATURES), read, write, table)
