"""LiBai's GPT, BERT and RoBERTa (https://github.com/Oneflow-Inc/libai): a state dict saved by PyTorch, or OneFlow's own folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dufu.errors import ConfigError
from dufu.interchange.formats.base import (
    FAMILIES,
    LEAVES,
    Format,
    Found,
    Made,
    Plan,
    Source,
    add_unseen,
    agree,
    choose_family,
    count_layers,
    linear,
    open_plain,
    refuse_setting,
    shape_of,
    told,
)  # fmt: skip
from dufu.interchange.formats.fused import fused
from dufu.interchange.formats.oneflow import is_oneflow, open_oneflow
from dufu.models.names import Part, Rule, Shape, Table, each, same
from dufu.models.roberta.model import OFFSET

OLD_NAMES = ((r"^module\.", ""),)
# Names of the settings of LiBai's BERT and RoBERTa; those of its GPT are ours, but for num_layers.
SETTINGS = (
    "num_layers", "intermediate_size", "hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings",
    "layernorm_eps", "bias_gelu_fusion", "bias_dropout_fusion", "scale_mask_softmax_fusion", "apply_query_key_layer_scaling",
    "amp_enabled", "add_pooling_layer", "add_binary_head", "pad_token_id", "apply_residual_post_layernorm",
)  # fmt: skip
_ROOTS = {"gpt2": "GPT_model.", "bert": "bert.", "roberta": "roberta."}
_ROWS = "(rows of no position)"


def _open(path: Path) -> Source:
    return open_oneflow(path) if is_oneflow(path) else open_plain(path)


def _guess(shapes: Mapping[str, Shape]) -> tuple[str, ...]:
    if any("token_embeddings.weight" in name and "vocab" not in name for name in shapes):
        return ("gpt2",)
    if any(name.startswith(("roberta.", "lm_head.")) for name in shapes):
        return ("roberta",)
    return ("bert",) if any(name.startswith(("bert.", "cls_head.")) for name in shapes) else ("bert", "roberta")


def _describe(source: Source, family: str) -> Found:
    shapes = source.shapes(OLD_NAMES)
    family = choose_family(family, _guess(shapes), source.path)
    root = _ROOTS[family] if any(name.startswith(_ROOTS[family]) for name in shapes) else ""
    layer = rf"{root}transformer\.layers" if family == "gpt2" else rf"{root}encoders"
    words = shape_of(shapes, f"{root}embeddings.{'token' if family == 'gpt2' else 'vocab'}_embeddings.weight", source.path)
    first = f"{layer}.0.mlp.dense_h_to_4h.weight".replace("\\", "")
    cfg: dict[str, Any] = {
        "vocab_size": words[0],
        "hidden_size": words[1],
        "hidden_layers": count_layers(shapes, rf"{layer}\.(\d+)\.", source.path),
        "ffn_hidden_size": shape_of(shapes, first, source.path)[0],
        "max_seq_length": shape_of(shapes, f"{root}embeddings.position_embeddings.weight", source.path)[0],
        "num_attention_heads": source.setting("num_attention_heads"),
    }
    agree(source, cfg, vocab_size="vocab_size", hidden_size="hidden_size", hidden_layers="hidden_layers", num_layers="hidden_layers",
          intermediate_size="ffn_hidden_size", ffn_hidden_size="ffn_hidden_size", max_position_embeddings="max_seq_length",
          max_seq_length="max_seq_length")  # fmt: skip
    notes = add_unseen(family, cfg, source.setting("size", ""))
    notes += told(source, cfg, "activation", "activation", "gelu", "the only one in LiBai's models")
    if family == "gpt2":
        refuse_setting(source, "apply_residual_post_layernorm", False)
        notes += _dropout(source, cfg, "embedding_dropout_prob", "attention_dropout_prob", "output_dropout_prob")
        notes += told(source, cfg, "layernorm_epsilon", "layernorm_epsilon", 1e-5, "LiBai's default")
        return Found(FAMILIES[family], {**cfg, "tie_word_embeddings": True}, notes)
    post = source.setting("apply_residual_post_layernorm")
    if post is None:
        raise ConfigError(
            f"{source.path}: the weights do not show apply_residual_post_layernorm; give apply_residual_post_layernorm=true for "
            f"a model that came from Hugging Face, false for LiBai's own default"
        )
    cfg["apply_residual_post_layernorm"] = bool(post)
    types = shapes.get(f"{root}embeddings.tokentype_embeddings.weight")
    cfg["num_tokentypes"] = 0 if types is None else types[0]
    notes += _dropout(source, cfg, "hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout_prob")
    notes += told(source, cfg, "layernorm_epsilon", "layernorm_eps", 1e-12, "LiBai's default")
    target, pooler = FAMILIES[family], f"{root}pooler.dense.weight" in shapes
    if not any(name.startswith(("cls_head.", "lm_head.")) for name in shapes):
        return Found(f"{target}Features", {**cfg, "pooler": pooler}, notes)
    if family == "bert" and cfg["layernorm_epsilon"] != 1e-5:
        notes.append(
            f"LiBai's BERT adds 1e-5 in the norm of its head, and {cfg['layernorm_epsilon']:g} elsewhere; here it is the same"
        )
    if family == "roberta":
        notes.append("LiBai's RoBERTa begins with row 0 of its position table; the converted one has these rows from row 2 on")
    return Found(target, {**cfg, "sentence_objective": "cls_head.seq_relationship.weight" in shapes}, notes)


def _dropout(source: Source, cfg: dict[str, Any], embedding: str, attention: str, output: str) -> list[str]:
    notes = []
    for ours, theirs in (
        ("embedding_dropout_prob", embedding), ("attention_dropout_prob", attention), ("output_dropout_prob", output),
    ):  # fmt: skip
        notes += told(source, cfg, ours, theirs, 0.1, "as in LiBai's configs")
    return notes


def _layer_rules(ours: str, theirs: str, cfg: Mapping[str, Any]) -> list[Rule]:
    heads, size = cfg["num_attention_heads"], cfg["hidden_size"] // cfg["num_attention_heads"]
    qkv = ("attention.query_key_value", "self_attention.query_key_value")
    return [
        *(fused(f"{ours}.{qkv[0]}.{leaf}", f"{theirs}.{qkv[1]}.{leaf}", heads, size) for leaf in LEAVES),
        *linear(f"{ours}.attention.output", f"{theirs}.self_attention.dense"),
        *linear(f"{ours}.mlp.expand", f"{theirs}.mlp.dense_h_to_4h"),
        *linear(f"{ours}.mlp.contract", f"{theirs}.mlp.dense_4h_to_h"),
    ]


def _plan(target: str, cfg: Mapping[str, Any], source: Source | None) -> Plan:
    family = next((f for f, t in FAMILIES.items() if target.startswith(t.rpartition(".")[0])), "")
    if target not in (FAMILIES.get(family), f"{FAMILIES.get(family)}Features") or cfg.get("num_experts"):
        raise ConfigError(f"{target} has no form in LiBai's format here; {', '.join(FAMILIES.values())} have")
    if cfg["activation"] != "gelu":
        raise ConfigError(f"model.cfg.activation={cfg['activation']!r}: LiBai's models compute 'gelu'")
    return _gpt(cfg) if family == "gpt2" else _encoder(family, target, cfg)


def _gpt(cfg: Mapping[str, Any]) -> Plan:
    if not cfg["tie_word_embeddings"]:
        raise ConfigError("model.cfg.tie_word_embeddings=false: LiBai's GPT scores with its word embedding")
    root = _ROOTS["gpt2"]

    def layer(number: int) -> Sequence[Rule]:
        ours, theirs = f"layers.{number}.block", f"{root}transformer.layers.{number}"
        return [
            *_layer_rules(ours, theirs, cfg),
            *linear(f"{ours}.attention_norm", f"{theirs}.input_layernorm"),
            *linear(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm"),
        ]

    rules = (
        same("embedding.word.weight", f"{root}embeddings.token_embeddings.weight", padded=True),
        same("embedding.position.weight", f"{root}embeddings.position_embeddings.weight"),
        *each(cfg["hidden_layers"], layer),
        *linear("head.norm", f"{root}transformer.layernorm_f"),
    )
    return Plan(Table(rules, prefix=root, old_names=OLD_NAMES))


def _encoder(family: str, target: str, cfg: Mapping[str, Any]) -> Plan:
    root, last, post = _ROOTS[family], cfg["hidden_layers"], cfg["apply_residual_post_layernorm"]

    def layer(number: int) -> Sequence[Rule]:
        ours, theirs = f"layers.{number}.block", f"{root}encoders.{number}"
        # In the order of the first BERT a layer's last norm is called the first one of the layer that follows.
        ends = f"{root}encoders.{number + 1}.input_layernorm" if number + 1 < last else f"{root}final_layernorm"
        middle = f"{theirs}.post_attention_layernorm"
        norms = (middle, ends) if post else (f"{theirs}.input_layernorm", middle)
        return [
            *_layer_rules(ours, theirs, cfg),
            *linear(f"{ours}.attention_norm", norms[0]),
            *linear(f"{ours}.mlp_norm", norms[1]),
        ]

    made, table = {}, f"{root}embeddings.position_embeddings.weight"
    position = same("embedding.position.weight", table)
    if family == "roberta":
        position = Rule(position.ours, (Part(_ROWS, 0, OFFSET), Part(table, OFFSET)))
        made[_ROWS] = Made(torch.zeros(OFFSET, cfg["hidden_size"]), needed=False)
    types = "embeddings.tokentype_embeddings.weight"
    rules = [
        same("embedding.word.weight", f"{root}embeddings.vocab_embeddings.weight", padded=True),
        position,
        *([same("embedding.token_type.weight", root + types)] if cfg["num_tokentypes"] else []),
        *each(last, layer),
        *(linear("embedding.norm", f"{root}encoders.0.input_layernorm") if post else linear("head.norm", f"{root}final_layernorm")),
    ]
    if target.endswith("Features"):
        rules += linear("head.pooler.dense", f"{root}pooler.dense") if cfg["pooler"] else []
    else:
        head = "cls_head.predictions" if family == "bert" else "lm_head"
        logits = "cls_head.lm_logits" if family == "bert" else "lm_head.lm_logits"
        rules += [
            *linear("head.transform", f"{head}.dense"),
            *linear("head.transform_norm", f"{head}.layernorm"),
            same("head.logits.bias", f"{logits}.bias", padded=True),
        ]
        if cfg["sentence_objective"]:
            rules += linear("head.pooler.dense", f"{root}pooler.dense") + linear("head.sentence", "cls_head.seq_relationship")
    return Plan(Table(tuple(rules), (r".*(position_ids|tokentype_ids)",), prefix=root, old_names=OLD_NAMES), made)


LIBAI = Format("libai", r"(^|\.)embeddings\.(token|vocab)_embeddings\.weight", _describe, _plan, _open, settings=SETTINGS)
