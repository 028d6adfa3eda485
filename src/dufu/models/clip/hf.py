"""CLIP as Hugging Face writes it: CLIPModel, with a config for each tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.errors import CheckpointError
from dufu.models.hf import Family, Fields, activation_name
from dufu.models.names import Rule, Table, joined, same
from dufu.models.vit.hf import one_of, side

TARGET = "dufu.models.clip.CLIP"
_OLD_END = 2  # an end token that early files name wrongly; transformers then takes the highest number in the text
# What older files repeat of every config, none of it of these towers.
_UNUSED = (
    "add_cross_attention", "chunk_size_feed_forward", "cross_attention_hidden_size", "dropout", "is_decoder", "pruned_heads",
    "tie_encoder_decoder", "tie_word_embeddings", "tf_legacy_loss", "use_bfloat16", "initializer_factor", "projection_dim",
)  # fmt: skip


def _tower(fields: Fields, name: str) -> Fields:
    """Return a tower's fields; a `…_dict`, which some files have, takes the place of the plain ones, as in transformers."""
    values = fields.take(f"{name}_dict", None) or fields.take(name, {})
    if not isinstance(values, dict):
        raise CheckpointError(f"{fields.where}: {name} is no JSON object")
    fields.ignore(name)
    return Fields(values, f"{fields.where}: {name}")


def _read(fields: Fields) -> tuple[str, dict[str, Any]]:
    one_of(fields, "CLIPModel")
    fields.ignore("initializer_factor", "logit_scale_init_value", "tie_word_embeddings")
    text, vision = _tower(fields, "text_config"), _tower(fields, "vision_config")
    both: dict[str, Any] = {}
    for ours, name, default in (
        ("attention_dropout_prob", "attention_dropout", 0.0),
        ("layernorm_epsilon", "layer_norm_eps", 1e-5),
        ("initializer_range", "initializer_range", 0.02),
    ):
        one, other = float(text.take(name, default)), float(vision.take(name, default))
        if one != other:
            raise CheckpointError(f"{fields.where}: {name} is {one} for texts and {other} for pictures; dufu's towers share it")
        both[ours] = one
    activation, other_activation = (tower.activation("hidden_act", "quick_gelu") for tower in (text, vision))
    if activation != other_activation:
        raise CheckpointError(f"{fields.where}: hidden_act differs between the towers; dufu's share it")
    end = text.take("eos_token_id", 49407)
    width, vision_width = text.whole("hidden_size", 512), vision.whole("hidden_size", 768)
    cfg = {
        "embed_dim": fields.whole("projection_dim", 512),
        "img_size": side(vision, "image_size", 224),
        "patch_size": side(vision, "patch_size", 32),
        "in_chans": vision.whole("num_channels", 3),
        "vision_width": vision_width,
        "vision_layers": vision.whole("num_hidden_layers", 12),
        "vision_heads": vision.whole("num_attention_heads", 12),
        "vision_ffn": vision.whole("intermediate_size", 3072),
        "context_length": text.whole("max_position_embeddings", 77),
        "vocab_size": text.whole("vocab_size", 49408),
        "transformer_width": width,
        "transformer_layers": text.whole("num_hidden_layers", 12),
        "transformer_heads": text.whole("num_attention_heads", 8),
        "transformer_ffn": text.whole("intermediate_size", 2048),
        "end_token": None if end == _OLD_END else int(end),
        "activation": activation,
        **both,
    }
    for tower in (text, vision):
        tower.ignore(*_UNUSED)
        tower.done()
    return TARGET, cfg


def _write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        "attention_dropout": cfg["attention_dropout_prob"],
        "layer_norm_eps": cfg["layernorm_epsilon"],
        "initializer_range": cfg["initializer_range"],
        "hidden_act": activation_name(cfg["activation"]),
        "projection_dim": cfg["embed_dim"],
    }
    return {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": cfg["embed_dim"],
        "text_config": {
            "model_type": "clip_text_model",
            "hidden_size": cfg["transformer_width"],
            "intermediate_size": cfg["transformer_ffn"] or 4 * cfg["transformer_width"],
            "num_hidden_layers": cfg["transformer_layers"],
            "num_attention_heads": cfg["transformer_heads"],
            "max_position_embeddings": cfg["context_length"],
            "vocab_size": cfg["vocab_size"],
            "eos_token_id": _OLD_END if cfg["end_token"] is None else cfg["end_token"],
            **both,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": cfg["vision_width"],
            "intermediate_size": cfg["vision_ffn"] or 4 * cfg["vision_width"],
            "num_hidden_layers": cfg["vision_layers"],
            "num_attention_heads": cfg["vision_heads"],
            "num_channels": cfg["in_chans"],
            "image_size": cfg["img_size"],
            "patch_size": cfg["patch_size"],
            **both,
        },
    }


def _layer(mine: str, theirs: str, width: int) -> list[Rule]:
    rules: list[Rule] = []
    for leaf in ("weight", "bias"):
        rules += [
            joined(f"{mine}attention.query_key_value.{leaf}", [(f"{theirs}self_attn.{k}_proj.{leaf}", width) for k in "qkv"]),
            same(f"{mine}attention.output.{leaf}", f"{theirs}self_attn.out_proj.{leaf}"),
            same(f"{mine}attention_norm.{leaf}", f"{theirs}layer_norm1.{leaf}"),
            same(f"{mine}mlp_norm.{leaf}", f"{theirs}layer_norm2.{leaf}"),
            same(f"{mine}mlp.expand.{leaf}", f"{theirs}mlp.fc1.{leaf}"),
            same(f"{mine}mlp.contract.{leaf}", f"{theirs}mlp.fc2.{leaf}"),
        ]
    return rules


def _table(target: str, cfg: Mapping[str, Any]) -> Table:
    pictures, texts = "vision_model.embeddings.", "text_model.embeddings."
    rules: list[Rule] = [
        same("embedding.class_token", f"{pictures}class_embedding"),
        same("embedding.patch.weight", f"{pictures}patch_embedding.weight"),
        same("embedding.picture_position.weight", f"{pictures}position_embedding.weight"),
        same("embedding.word.weight", f"{texts}token_embedding.weight"),
        same("embedding.text_position.weight", f"{texts}position_embedding.weight"),
        same("head.picture.weight", "visual_projection.weight"),
        same("head.text.weight", "text_projection.weight"),
        same("head.scale", "logit_scale"),
    ]
    for leaf in ("weight", "bias"):
        rules += [
            same(f"embedding.picture_norm.{leaf}", f"vision_model.pre_layrnorm.{leaf}"),
            same(f"head.picture_norm.{leaf}", f"vision_model.post_layernorm.{leaf}"),
            same(f"head.text_norm.{leaf}", f"text_model.final_layer_norm.{leaf}"),
        ]
    for i in range(cfg["vision_layers"]):
        rules += _layer(f"picture.{i}.block.", f"vision_model.encoder.layers.{i}.", cfg["vision_width"])
    for i in range(cfg["transformer_layers"]):
        rules += _layer(f"text.{i}.block.", f"text_model.encoder.layers.{i}.", cfg["transformer_width"])
    return Table(tuple(rules), ignored=(r"(text|vision)_model\.embeddings\.position_ids",))


FAMILY = Family((TARGET,), _read, _write, _table)
