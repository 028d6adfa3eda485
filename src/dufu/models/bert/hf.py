"""BERT's config.json and weights, with or without its heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dufu.errors import CheckpointError
from dufu.models.hf import Family, Fields, activation_name, refuse_unless
from dufu.models.names import Rule, Table, each, joined, same

PACKAGE = "dufu.models.bert"
PRETRAINING, CLASSIFIER, FEATURES = f"{PACKAGE}.Bert", f"{PACKAGE}.BertClassifier", f"{PACKAGE}.BertFeatures"

LEAVES = ("weight", "bias")
OLD_NAMES = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))


def encoder_fields(fields: Fields, offset: int = 0) -> dict[str, Any]:
    """Return the arguments that all encoders in BERT's likeness share.

    Args:
        offset: rows of the position table before that of position 0.
    """
    fields.expect("position_embedding_type", "absolute")
    fields.expect("is_decoder", False)
    fields.expect("add_cross_attention", False)
    fields.expect("tie_word_embeddings", True)
    for name in ("chunk_size_feed_forward", "pruned_heads", "directionality", "pooler_fc_size", "pooler_num_attention_heads",
                 "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"):  # fmt: skip
        fields.ignore(name)
    hidden = fields.whole("hidden_size", 768)
    dropout = fields.take("hidden_dropout_prob", 0.1)
    return {
        "vocab_size": fields.whole("vocab_size", 30522),
        "hidden_layers": fields.whole("num_hidden_layers", 12),
        "hidden_size": hidden,
        "ffn_hidden_size": fields.whole("intermediate_size", 4 * hidden),
        "num_attention_heads": fields.whole("num_attention_heads", 12),
        "max_seq_length": fields.whole("max_position_embeddings", 512) - offset,
        "num_tokentypes": fields.whole("type_vocab_size", 2),
        "embedding_dropout_prob": dropout,
        "attention_dropout_prob": fields.take("attention_probs_dropout_prob", 0.1),
        "output_dropout_prob": dropout,
        "layernorm_epsilon": fields.take("layer_norm_eps", 1e-12),
        "initializer_range": fields.take("initializer_range", 0.02),
        "activation": fields.activation("hidden_act", "gelu"),
    }


def written_encoder(cfg: Mapping[str, Any], kind: str, offset: int = 0) -> dict[str, Any]:
    """Return the fields that all encoders in BERT's likeness share; `kind` is the model_type."""
    refuse_unless(cfg, kind, apply_residual_post_layernorm=True, output_dropout_prob=cfg["embedding_dropout_prob"])
    if not cfg["num_tokentypes"]:
        refuse_unless(cfg, kind, num_tokentypes=2)
    return {
        "model_type": kind,
        "vocab_size": cfg["vocab_size"],
        "num_hidden_layers": cfg["hidden_layers"],
        "hidden_size": cfg["hidden_size"],
        "intermediate_size": cfg["ffn_hidden_size"] or 4 * cfg["hidden_size"],
        "num_attention_heads": cfg["num_attention_heads"],
        "max_position_embeddings": cfg["max_seq_length"] + offset,
        "type_vocab_size": cfg["num_tokentypes"],
        "hidden_dropout_prob": cfg["embedding_dropout_prob"],
        "attention_probs_dropout_prob": cfg["attention_dropout_prob"],
        "layer_norm_eps": cfg["layernorm_epsilon"],
        "initializer_range": cfg["initializer_range"],
        "hidden_act": activation_name(cfg["activation"]),
        "tie_word_embeddings": True,
    }


def classifier_fields(fields: Fields, key: str = "classifier_dropout") -> dict[str, Any]:
    """Return the arguments of a classifier: classes, and its dropout."""
    labels = fields.values.get("id2label")
    count = fields.values.get("num_labels") or (len(labels) if isinstance(labels, Mapping) else 2)
    return {"num_labels": int(count), "classifier_dropout_prob": fields.take(key, fields.take("hidden_dropout_prob", 0.1))}


def written_classifier(cfg: Mapping[str, Any], key: str = "classifier_dropout") -> dict[str, Any]:
    """Return the fields of a classifier."""
    labels = {str(number): f"LABEL_{number}" for number in range(cfg["num_labels"])}
    return {
        key: cfg["classifier_dropout_prob"],
        "id2label": labels,
        "label2id": {label: int(number) for number, label in labels.items()},
        "problem_type": "regression" if cfg["num_labels"] == 1 else "single_label_classification",
    }


def linear(ours: str, theirs: str) -> list[Rule]:
    """Return the rules of a weight and a bias."""
    return [same(f"{ours}.{leaf}", f"{theirs}.{leaf}") for leaf in LEAVES]


def encoder_rules(cfg: Mapping[str, Any], prefix: str) -> list[Rule]:
    """Return the rules of embedding and layers; their names begin with `prefix`."""
    hidden, tables = cfg["hidden_size"], f"{prefix}embeddings"

    def layer(number: int) -> Sequence[Rule]:
        ours, theirs = f"layers.{number}.block", f"{prefix}encoder.layer.{number}"
        fused = [
            joined(
                f"{ours}.attention.query_key_value.{leaf}",
                [(f"{theirs}.attention.self.{kind}.{leaf}", hidden) for kind in ("query", "key", "value")],
            )
            for leaf in LEAVES
        ]
        return [
            *fused,
            *linear(f"{ours}.attention.output", f"{theirs}.attention.output.dense"),
            *linear(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm"),
            *linear(f"{ours}.mlp.expand", f"{theirs}.intermediate.dense"),
            *linear(f"{ours}.mlp.contract", f"{theirs}.output.dense"),
            *linear(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm"),
        ]

    return [
        same("embedding.word.weight", f"{tables}.word_embeddings.weight"),
        same("embedding.position.weight", f"{tables}.position_embeddings.weight"),
        same("embedding.token_type.weight", f"{tables}.token_type_embeddings.weight"),
        *linear("embedding.norm", f"{tables}.LayerNorm"),
        *each(cfg["hidden_layers"], layer),
    ]


def read(fields: Fields) -> tuple[str, dict[str, Any]]:
    """See Family."""
    cfg = encoder_fields(fields)
    fields.ignore("classifier_dropout")
    kind = fields.architecture
    if kind in ("", "BertModel"):
        return FEATURES, cfg
    if kind in ("BertForPreTraining", "BertForMaskedLM"):
        return PRETRAINING, {**cfg, "sentence_objective": kind == "BertForPreTraining"}
    if kind == "BertForSequenceClassification":
        return CLASSIFIER, {**cfg, **classifier_fields(fields)}
    raise CheckpointError(
        f"{fields.where}: architectures={kind} is not built; BertModel, BertForPreTraining, BertForMaskedLM and "
        f"BertForSequenceClassification are"
    )


def write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """See Family."""
    if not cfg["apply_residual_post_layernorm"]:
        return _before_branches().write(target, cfg)
    common = written_encoder(cfg, "bert")
    if target == CLASSIFIER:
        return {**common, "architectures": ["BertForSequenceClassification"], **written_classifier(cfg)}
    if target == FEATURES:
        return {**common, "architectures": ["BertModel"]}
    return {**common, "architectures": ["BertForPreTraining" if cfg["sentence_objective"] else "BertForMaskedLM"]}


def _before_branches() -> Family:
    """Return the family of BERT with the norms before each branch, which has a model_type of its own."""
    from dufu.models.bert.megatron import FAMILY as MEGATRON

    return MEGATRON


def head_rules(target: str, cfg: Mapping[str, Any]) -> tuple[list[Rule], dict[str, str]]:
    """Return the rules of a head, and the names under which a file repeats tied weights."""
    rules: list[Rule] = []
    copies: dict[str, str] = {}
    if target == FEATURES:
        rules += linear("head.pooler.dense", "pooler.dense") if cfg["pooler"] else []
    elif target == CLASSIFIER:
        rules += [*linear("head.pooler.dense", "bert.pooler.dense"), *linear("head.classes", "classifier")]
    else:
        rules += [
            *linear("head.transform", "cls.predictions.transform.dense"),
            *linear("head.transform_norm", "cls.predictions.transform.LayerNorm"),
            same("head.logits.bias", "cls.predictions.bias"),
        ]
        copies = {
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        }
        if cfg["sentence_objective"]:
            rules += [*linear("head.pooler.dense", "bert.pooler.dense"), *linear("head.sentence", "cls.seq_relationship")]
    return rules, copies


def table(target: str, cfg: Mapping[str, Any]) -> Table:
    """See Family."""
    if not cfg["apply_residual_post_layernorm"]:
        return _before_branches().table(target, cfg)
    rules, copies = head_rules(target, cfg)
    rules = [*encoder_rules(cfg, "" if target == FEATURES else "bert."), *rules]
    spare: tuple[str, ...] = (r"cls\..*",) if target == FEATURES else ()
    if target == PRETRAINING and not cfg["sentence_objective"]:
        spare = (r"bert\.pooler\..*", r"cls\.seq_relationship\..*")
    ignored = (r"(bert\.)?embeddings\.(position_ids|token_type_ids)",)
    return Table(tuple(rules), ignored, copies, "bert.", OLD_NAMES, spare=spare)


FAMILY = Family((PRETRAINING, CLASSIFIER, FEATURES), read, write, table)
