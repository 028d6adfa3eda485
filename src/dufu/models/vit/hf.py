"""ViT as Hugging Face writes it: ViTForImageClassification, or without classes ViTModel.

What plays a part in training alone, drop_path_rate and label_smoothing, has no field there and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.errors import CheckpointError, ConfigError
from dufu.models.hf import Family, Fields, activation_name
from dufu.models.names import Rule, Table, each, joined, same

TARGET = "dufu.models.vit.VisionTransformer"


def class_count(fields: Fields) -> int:
    """Return the number of classes that a config.json names; two where it names none, as transformers takes it."""
    named = fields.take("id2label", None)
    return len(named) if named else int(fields.take("num_labels", 2))


def class_names(count: int) -> dict[str, Any]:
    """Return the fields that say how many classes there are."""
    return {
        "id2label": {str(i): f"LABEL_{i}" for i in range(count)},
        "label2id": {f"LABEL_{i}": i for i in range(count)},
    }


def side(fields: Fields, name: str, default: int) -> int:
    """Return a side length; pictures and patches are squares.

    Raises:
        CheckpointError: no square, or no whole number.
    """
    value = fields.take(name, default)
    if isinstance(value, (list, tuple)):
        if len(set(value)) != 1:
            raise CheckpointError(f"{fields.where}: {name}={list(value)}: dufu's pictures and patches are squares")
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{fields.where}: {name}={value!r}: a whole number of at least 1")
    return value


def one_of(fields: Fields, *known: str) -> str:
    """Return the architecture of a config.json; the first of those known where it names none.

    Raises:
        CheckpointError: another one.
    """
    found = fields.architecture or known[0]
    if found not in known:
        raise CheckpointError(f"{fields.where}: architectures=[{found!r}] is not built; {' and '.join(known)} are")
    return found


def _read(fields: Fields) -> tuple[str, dict[str, Any]]:
    architecture = one_of(fields, "ViTForImageClassification", "ViTModel")
    width = fields.whole("hidden_size", 768)
    bare = architecture == "ViTModel"
    fields.expect("qkv_bias", True)
    if bare:
        fields.expect("pooler_act", "tanh")
        fields.expect("pooler_output_size", None, width)
    fields.ignore("encoder_stride", "pooler_act", "pooler_output_size")
    return TARGET, {
        "img_size": side(fields, "image_size", 224),
        "patch_size": side(fields, "patch_size", 16),
        "in_chans": fields.whole("num_channels", 3),
        "embed_dim": width,
        "depth": fields.whole("num_hidden_layers", 12),
        "num_heads": fields.whole("num_attention_heads", 12),
        "mlp_ratio": fields.whole("intermediate_size", 3072) / width,
        "drop_rate": float(fields.take("hidden_dropout_prob", 0.0)),
        "attn_drop_rate": float(fields.take("attention_probs_dropout_prob", 0.0)),
        "num_classes": 0 if bare else class_count(fields),
        "pooler": bare,
        "layernorm_epsilon": float(fields.take("layer_norm_eps", 1e-12)),
        "initializer_range": float(fields.take("initializer_range", 0.02)),
        "activation": fields.activation("hidden_act", "gelu"),
    }


def _write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    bare = not cfg["num_classes"]
    if cfg["pooler"] != bare:
        raise ConfigError(
            f"model.cfg.pooler={cfg['pooler']}: Hugging Face's ViT has a pooler where it has no classes (num_classes=0), and only there"
        )
    return {
        "model_type": "vit",
        "architectures": ["ViTModel" if bare else "ViTForImageClassification"],
        "hidden_size": cfg["embed_dim"],
        "num_hidden_layers": cfg["depth"],
        "num_attention_heads": cfg["num_heads"],
        "intermediate_size": round(cfg["embed_dim"] * cfg["mlp_ratio"]),
        "hidden_act": activation_name(cfg["activation"]),
        "hidden_dropout_prob": cfg["drop_rate"],
        "attention_probs_dropout_prob": cfg["attn_drop_rate"],
        "initializer_range": cfg["initializer_range"],
        "layer_norm_eps": cfg["layernorm_epsilon"],
        "image_size": cfg["img_size"],
        "patch_size": cfg["patch_size"],
        "num_channels": cfg["in_chans"],
        "qkv_bias": True,
        **({} if bare else class_names(cfg["num_classes"])),
    }


def _table(target: str, cfg: Mapping[str, Any]) -> Table:
    bare = not cfg["num_classes"]
    base, width = "" if bare else "vit.", cfg["embed_dim"]

    def layer(i: int) -> list[Rule]:
        mine, theirs = f"layers.{i}.block.", f"{base}encoder.layer.{i}."
        rules: list[Rule] = []
        for leaf in ("weight", "bias"):
            parts = [(f"{theirs}attention.attention.{what}.{leaf}", width) for what in ("query", "key", "value")]
            rules += [
                joined(f"{mine}attention.query_key_value.{leaf}", parts),
                same(f"{mine}attention.output.{leaf}", f"{theirs}attention.output.dense.{leaf}"),
                same(f"{mine}attention_norm.{leaf}", f"{theirs}layernorm_before.{leaf}"),
                same(f"{mine}mlp_norm.{leaf}", f"{theirs}layernorm_after.{leaf}"),
                same(f"{mine}mlp.expand.{leaf}", f"{theirs}intermediate.dense.{leaf}"),
                same(f"{mine}mlp.contract.{leaf}", f"{theirs}output.dense.{leaf}"),
            ]
        return rules

    rules = [
        same("embedding.class_token", f"{base}embeddings.cls_token"),
        same("embedding.position", f"{base}embeddings.position_embeddings"),
        *each(cfg["depth"], layer),
    ]
    for leaf in ("weight", "bias"):
        rules.append(same(f"embedding.patch.{leaf}", f"{base}embeddings.patch_embeddings.projection.{leaf}"))
        rules.append(same(f"head.norm.{leaf}", f"{base}layernorm.{leaf}"))
        if not bare:
            rules.append(same(f"head.classes.{leaf}", f"classifier.{leaf}"))
        if cfg["pooler"]:
            rules.append(same(f"head.pooler.dense.{leaf}", f"{base}pooler.dense.{leaf}"))
    return Table(tuple(rules), ignored=(r"(vit\.)?embeddings\.mask_token",), prefix="vit.")


FAMILY = Family((TARGET,), _read, _write, _table)
