"""Swin and Swin V2 as Hugging Face writes them: SwinForImageClassification, SwinModel, and the same of Swinv2.

What plays a part in training alone, label_smoothing, has no field there and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.errors import CheckpointError, ConfigError
from dufu.models.hf import Family, Fields, activation_name, refuse_unless
from dufu.models.names import Rule, Table, joined, same
from dufu.models.vit.hf import class_count, class_names, one_of, side

V1, V2 = "dufu.models.swin.SwinTransformer", "dufu.models.swin.SwinTransformerV2"
_NAMES = {V1: ("swin", "Swin"), V2: ("swinv2", "Swinv2")}


def _numbers(fields: Fields, name: str, default: list[int]) -> list[int]:
    value = fields.take(name, default)
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(v, int) and v >= 0 for v in value):
        raise CheckpointError(f"{fields.where}: {name}={value!r}: a list of whole numbers, one for each stage")
    return list(value)


def _read(fields: Fields) -> tuple[str, dict[str, Any]]:
    target = V2 if fields.values.get("model_type") == "swinv2" else V1
    _, kind = _NAMES[target]
    architecture = one_of(fields, f"{kind}ForImageClassification", f"{kind}Model")
    depths, width = _numbers(fields, "depths", [2, 2, 6, 2]), fields.whole("embed_dim", 96)
    fields.expect("num_layers", len(depths))
    fields.expect("hidden_size", None, width * 2 ** (len(depths) - 1))
    fields.expect("path_norm", True)
    # Of a backbone's outputs, and of a decoder that fills masked patches, which are other models.
    fields.ignore("encoder_stride", "out_features", "out_indices", "stage_names")
    cfg: dict[str, Any] = {
        "img_size": side(fields, "image_size", 224),
        "patch_size": side(fields, "patch_size", 4),
        "in_chans": fields.whole("num_channels", 3),
        "num_classes": 0 if architecture.endswith("Model") else class_count(fields),
        "embed_dim": width,
        "depths": depths,
        "num_heads": _numbers(fields, "num_heads", [3, 6, 12, 24]),
        "window_size": fields.whole("window_size", 7),
        "mlp_ratio": float(fields.take("mlp_ratio", 4.0)),
        "qkv_bias": bool(fields.take("qkv_bias", True)),
        "drop_rate": float(fields.take("hidden_dropout_prob", 0.0)),
        "attn_drop_rate": float(fields.take("attention_probs_dropout_prob", 0.0)),
        "drop_path_rate": float(fields.take("drop_path_rate", 0.1)),
        "ape": bool(fields.take("use_absolute_embeddings", False)),
        "layernorm_epsilon": float(fields.take("layer_norm_eps", 1e-5)),
        "initializer_range": float(fields.take("initializer_range", 0.02)),
        "activation": fields.activation("hidden_act", "gelu"),
    }
    if target == V2:
        trained = _numbers(fields, "pretrained_window_sizes", [0] * len(depths))
        cfg["pretrained_window_sizes"] = trained if any(trained) else None
    _check_window(fields.where, target, cfg)
    return target, cfg


def _check_window(where: str, target: str, cfg: Mapping[str, Any]) -> None:
    """Refuse what transformers' Swin cannot compute itself: windows larger than a stage's grid."""
    smallest = cfg["img_size"] // cfg["patch_size"] // 2 ** (len(cfg["depths"]) - 1)
    if target == V1 and smallest < cfg["window_size"]:
        raise CheckpointError(
            f"{where}: window_size={cfg['window_size']} is larger than the last stage's grid of {smallest} patches, for which "
            f"transformers' Swin has no table of biases"
        )


def _write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    kind, name = _NAMES[target]
    refuse_unless(cfg, name, patch_norm=True)
    try:
        _check_window("model.cfg", target, cfg)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    bare, stages = not cfg["num_classes"], len(cfg["depths"])
    fields: dict[str, Any] = {
        "model_type": kind,
        "architectures": [f"{name}Model" if bare else f"{name}ForImageClassification"],
        "image_size": cfg["img_size"],
        "patch_size": cfg["patch_size"],
        "num_channels": cfg["in_chans"],
        "embed_dim": cfg["embed_dim"],
        "hidden_size": cfg["embed_dim"] * 2 ** (stages - 1),
        "depths": list(cfg["depths"]),
        "num_layers": stages,
        "num_heads": list(cfg["num_heads"]),
        "window_size": cfg["window_size"],
        "mlp_ratio": cfg["mlp_ratio"],
        "qkv_bias": cfg["qkv_bias"],
        "hidden_dropout_prob": cfg["drop_rate"],
        "attention_probs_dropout_prob": cfg["attn_drop_rate"],
        "drop_path_rate": cfg["drop_path_rate"],
        "hidden_act": activation_name(cfg["activation"]),
        "use_absolute_embeddings": cfg["ape"],
        "initializer_range": cfg["initializer_range"],
        "layer_norm_eps": cfg["layernorm_epsilon"],
        **({} if bare else class_names(cfg["num_classes"])),
    }
    if target == V2:
        fields["pretrained_window_sizes"] = list(cfg["pretrained_window_sizes"] or [0] * stages)
    return fields


def _layer(target: str, cfg: Mapping[str, Any], mine: str, theirs: str, width: int) -> list[Rule]:
    attention, rules = f"{theirs}attention.self.", []
    parts = {leaf: [(f"{attention}{what}.{leaf}", width) for what in ("query", "key", "value")] for leaf in ("weight", "bias")}
    rules.append(joined(f"{mine}attention.query_key_value.weight", parts["weight"]))
    if target == V1:
        rules.append(same(f"{mine}bias.weight", f"{attention}relative_position_bias_table"))
        if cfg["qkv_bias"]:
            rules.append(joined(f"{mine}attention.query_key_value.bias", parts["bias"]))
    else:
        network = f"{attention}continuous_position_bias_mlp."
        rules += [
            same(f"{mine}attention.head_scale.weight", f"{attention}logit_scale"),
            same(f"{mine}bias.expand.weight", f"{network}0.weight"),
            same(f"{mine}bias.expand.bias", f"{network}0.bias"),
            same(f"{mine}bias.contract.weight", f"{network}2.weight"),
        ]
        if cfg["qkv_bias"]:
            rules.append(joined(f"{mine}attention.query_value.bias", [parts["bias"][0], parts["bias"][2]]))
    for leaf in ("weight", "bias"):
        rules += [
            same(f"{mine}attention.output.{leaf}", f"{theirs}attention.output.dense.{leaf}"),
            same(f"{mine}attention_norm.{leaf}", f"{theirs}layernorm_before.{leaf}"),
            same(f"{mine}mlp_norm.{leaf}", f"{theirs}layernorm_after.{leaf}"),
            same(f"{mine}mlp.expand.{leaf}", f"{theirs}intermediate.dense.{leaf}"),
            same(f"{mine}mlp.contract.{leaf}", f"{theirs}output.dense.{leaf}"),
        ]
    return rules


def _table(target: str, cfg: Mapping[str, Any]) -> Table:
    kind, bare = _NAMES[target][0], not cfg["num_classes"]
    base = "" if bare else f"{kind}."
    rules: list[Rule] = []
    if cfg["ape"]:
        rules.append(same("embedding.position", f"{base}embeddings.position_embeddings"))
    for leaf in ("weight", "bias"):
        rules.append(same(f"embedding.patch.{leaf}", f"{base}embeddings.patch_embeddings.projection.{leaf}"))
        if cfg["patch_norm"]:
            rules.append(same(f"embedding.norm.{leaf}", f"{base}embeddings.norm.{leaf}"))
        rules.append(same(f"head.norm.{leaf}", f"{base}layernorm.{leaf}"))
        if not bare:
            rules.append(same(f"head.classes.{leaf}", f"classifier.{leaf}"))
    number = 0
    for stage, depth in enumerate(cfg["depths"]):
        if stage:
            merging, down = f"layers.{number}.merging.", f"{base}encoder.layers.{stage - 1}.downsample."
            rules.append(same(f"{merging}reduction.weight", f"{down}reduction.weight"))
            rules += [same(f"{merging}norm.{leaf}", f"{down}norm.{leaf}") for leaf in ("weight", "bias")]
        for index in range(depth):
            theirs = f"{base}encoder.layers.{stage}.blocks.{index}."
            rules += _layer(target, cfg, f"layers.{number}.", theirs, cfg["embed_dim"] * 2**stage)
            number += 1
    buffers = r".*attention\.self\.relative_(position_index|coords_table)"
    return Table(tuple(rules), ignored=(buffers, r".*embeddings\.mask_token"), prefix=f"{kind}.")


FAMILY = Family((V1, V2), _read, _write, _table)
