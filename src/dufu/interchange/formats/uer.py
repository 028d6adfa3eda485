"""UER-py's and TencentPretrain's GPT-2, BERT and RoBERTa (https://github.com/dbiir/UER-py, …/Tencent/TencentPretrain).

Both programs' norm divides by (the sample's standard deviation + 1e-6), not by √(variance + ε); `dufu convert --exact-norms`
multiplies the norms' weights by √((n - 1) / n), which makes the same of it but for ε.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dufu.errors import CheckpointError, ConfigError
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
    shape_of,
    told,
)  # fmt: skip
from dufu.models.hf import ACTIVATIONS
from dufu.models.names import Part, Rule, Shape, Table, each, joined, same
from dufu.models.roberta.model import OFFSET

OLD_NAMES = (
    (r"^module\.", ""),
    (r"^embedding\.word_embedding\.", "embedding.word.embedding."),
    (r"^embedding\.position_embedding\.", "embedding.pos.embedding."),
    (r"^embedding\.segment_embedding\.", "embedding.seg.embedding."),
    (r"^encoder\.block\.", "encoder.transformer."),
    (r"^target\.mlm_linear_", "target.mlm.linear_"),
    (r"^target\.layer_norm\.", "target.mlm.layer_norm."),
    (r"^target\.(sp|nsp|sop)_linear_", "target.sp.linear_"),
    (r"^target\.output_layer\.", "target.lm.output_layer."),
)
# A config's settings, and the one value of each that is built; None = any, taken below or of no effect on the numbers.
SETTINGS: dict[str, tuple[Any, ...] | None] = {
    "emb_size": None, "feedforward_size": None, "hidden_size": None, "hidden_act": None, "heads_num": None, "layers_num": None,
    "max_seq_length": None, "dropout": None, "data_processor": None, "tie_weights": None, "layernorm_positioning": None,
    "has_lmtarget_bias": None, "remove_embedding_layernorm": None, "mask": None, "target": None, "embedding": None, "vocab_path": None,
    "deep_init": None, "learning_rate": None, "pooling": ("first",), "labels_num": None, "mlm_probability": None,
    "encoder": ("transformer",), "feed_forward": ("dense",), "layernorm": ("normal",), "layernorm_eps": None,
    "parameter_sharing": (False,), "factorized_embedding_parameterization": (False,), "relative_position_embedding": (False,),
    "rotary_position_embedding": (False,), "alibi_position_embedding": (False,), "remove_attention_scale": (False,),
    "remove_transformer_bias": (False,), "has_residual_attention": (False,), "local_kv_heads_num": None, "attention_head_size": None,
}  # fmt: skip
_ROWS, _NORM = "(rows of no position)", (("weight", "gamma"), ("bias", "beta"))
_WORDS, _PLACES, _SEGMENTS = (f"embedding.{kind}.embedding.weight" for kind in ("word", "pos", "seg"))
_SCORES = "target.lm.output_layer"
_LEFT = {"gpt2": 0, "bert": 1, "roberta": 1}  # rows of the segment table before those of real segments


def _guess(shapes: Mapping[str, Shape]) -> tuple[str, ...]:
    if any(name.startswith("target.lm.") for name in shapes) or _SEGMENTS not in shapes:
        return ("gpt2",)
    return ("bert",) if any(name.startswith(("target.sp.", "output_layer_")) for name in shapes) else ("bert", "roberta")


def _check_settings(source: Source) -> None:
    for name, value in source.settings.items():
        allowed = SETTINGS.get(name, ())
        if allowed is not None and value not in allowed:
            what = f"; {allowed[0]!r} is" if allowed else ", and might change the numbers; take out of the config what does not"
            raise ConfigError(f"{source.path}: {name}={value!r} is not built{what}")
    heads, hidden = source.setting("heads_num"), source.setting("hidden_size")
    for name, built in (("local_kv_heads_num", heads), ("attention_head_size", hidden and heads and hidden // heads)):
        if source.setting(name) not in (None, built):
            raise ConfigError(f"{source.path}: {name}={source.setting(name)} is not built; {built} is")


def _describe(source: Source, family: str) -> Found:
    _check_settings(source)
    shapes = source.shapes(OLD_NAMES)
    family = choose_family(family, _guess(shapes), source.path)
    words = shape_of(shapes, _WORDS, source.path)
    cfg: dict[str, Any] = {
        "vocab_size": words[0],
        "hidden_size": words[1],
        "hidden_layers": count_layers(shapes, r"encoder\.transformer\.(\d+)\.", source.path),
        "ffn_hidden_size": shape_of(shapes, "encoder.transformer.0.feed_forward.linear_1.weight", source.path)[0],
        "max_seq_length": shape_of(shapes, _PLACES, source.path)[0],
        "num_attention_heads": source.setting("heads_num", source.setting("num_attention_heads")),
    }
    agree(source, cfg, emb_size="hidden_size", hidden_size="hidden_size", feedforward_size="ffn_hidden_size", layers_num="hidden_layers",
          max_seq_length="max_seq_length")  # fmt: skip
    notes = add_unseen(family, cfg, source.setting("size", ""))
    default = "gelu_tanh" if family == "gpt2" else "gelu"
    notes += told(
        source, cfg, "activation", "hidden_act", default, f"as in their configs of {family}", lambda v: _activation(source, v)
    )
    for ours in ("embedding_dropout_prob", "attention_dropout_prob", "output_dropout_prob"):
        notes += told(source, cfg, ours, "dropout", 0.1, "as in their configs")
    epsilon = 1e-5 if family in ("gpt2", "roberta") else 1e-12
    notes += told(source, cfg, "layernorm_epsilon", "", epsilon, "as in the Hugging Face configs of their released models")
    if family == "gpt2":
        tied = _tied(source, shapes)
        return Found(FAMILIES[family], {**cfg, "tie_word_embeddings": tied}, notes)
    if "encoder.layer_norm.gamma" in shapes:
        raise ConfigError(f"{source.path}: layernorm_positioning='pre' is not built for {family}; 'post' is")
    cfg["num_tokentypes"] = 1 if family == "roberta" else shape_of(shapes, _SEGMENTS, source.path)[0] - _LEFT[family]
    if family == "roberta":
        notes.append("row 1 of the segment table is taken, which they use for every single text; their own script takes row 2")
        cfg["max_seq_length"] -= _unused_positions(source, cfg, notes)
    if "output_layer_2.weight" in shapes:
        labels = shapes["output_layer_2.weight"][0]
        return Found(f"{FAMILIES[family]}Classifier", {**cfg, "num_labels": labels, "classifier_dropout_prob": 0.0}, notes)
    if "target.mlm.linear_1.weight" not in shapes:
        return Found(f"{FAMILIES[family]}Features", {**cfg, "pooler": False}, notes)
    return Found(FAMILIES[family], {**cfg, "sentence_objective": "target.sp.linear_1.weight" in shapes}, notes)


def _activation(source: Source, name: str) -> str:
    if name not in ACTIVATIONS:
        raise ConfigError(f"{source.path}: hidden_act={name!r} is not built; gelu, gelu_fast and relu are")
    return ACTIVATIONS[name]


def _tied(source: Source, shapes: Mapping[str, Shape]) -> bool:
    """Return whether the scores are made with the word embedding: the config's word, or whether the two tables are equal."""
    if source.setting("tie_weights", source.setting("tie_word_embeddings")) is not None:
        return bool(source.setting("tie_weights", source.setting("tie_word_embeddings")))
    name = f"{_SCORES}.weight"
    if name not in shapes:
        return True
    if shapes[name] != shapes[_WORDS]:
        raise CheckpointError(f"{source.path}: {name} is {list(shapes[name])}, {_WORDS} {list(shapes[_WORDS])}")
    step = 4096
    return all(
        torch.equal(*(source.rows(OLD_NAMES, which, first, min(step, shapes[name][0] - first)) for which in (name, _WORDS)))
        for first in range(0, shapes[name][0], step)
    )


def _unused_positions(source: Source, cfg: Mapping[str, Any], notes: list[str]) -> int:
    """Return how many rows at the end of RoBERTa's position table are zeros that their script put there."""
    rows = cfg["max_seq_length"]
    if rows <= OFFSET or bool(source.rows(OLD_NAMES, _PLACES, rows - OFFSET, OFFSET).any()):
        return 0
    notes.append(f"the last {OFFSET} rows of the position table are zeros and stand for no position")
    return OFFSET


def _rules(cfg: Mapping[str, Any]) -> list[Rule]:
    hidden = cfg["hidden_size"]

    def layer(number: int) -> Sequence[Rule]:
        ours, theirs = f"layers.{number}.block", f"encoder.transformer.{number}"
        return [
            *(
                joined(
                    f"{ours}.attention.query_key_value.{leaf}",
                    [(f"{theirs}.self_attn.linear_layers.{kind}.{leaf}", hidden) for kind in range(3)],
                )
                for leaf in LEAVES
            ),
            *linear(f"{ours}.attention.output", f"{theirs}.self_attn.final_linear"),
            *linear(f"{ours}.attention_norm", f"{theirs}.layer_norm_1", _NORM),
            *linear(f"{ours}.mlp.expand", f"{theirs}.feed_forward.linear_1"),
            *linear(f"{ours}.mlp.contract", f"{theirs}.feed_forward.linear_2"),
            *linear(f"{ours}.mlp_norm", f"{theirs}.layer_norm_2", _NORM),
        ]

    return [same("embedding.word.weight", _WORDS, padded=True), *each(cfg["hidden_layers"], layer)]


def _plan(target: str, cfg: Mapping[str, Any], source: Source | None) -> Plan:
    if target == FAMILIES["gpt2"] and not cfg["num_experts"]:
        return _gpt(cfg)
    family = next((f for f in ("bert", "roberta") if target.startswith(FAMILIES[f])), "")
    if not family:
        raise ConfigError(f"{target} has no form in UER-py's format here; {', '.join(FAMILIES.values())} have")
    if not cfg["apply_residual_post_layernorm"]:
        raise ConfigError("model.cfg.apply_residual_post_layernorm=false is not built for UER-py's format; true is")
    return _encoder(family, target, cfg)


def _gpt(cfg: Mapping[str, Any]) -> Plan:
    tied, scores = cfg["tie_word_embeddings"], f"{_SCORES}.weight"
    rules = [
        *_rules(cfg),
        same("embedding.position.weight", _PLACES),
        *linear("head.norm", "encoder.layer_norm", _NORM),
        *([] if tied else [same("head.word.weight", scores, padded=True)]),
    ]
    return Plan(
        Table(tuple(rules), copies={scores: _WORDS} if tied else {}, old_names=OLD_NAMES),
        zeros=(r"target\.lm\.output_layer\.bias",),
    )


def _encoder(family: str, target: str, cfg: Mapping[str, Any]) -> Plan:
    types, made, copies = cfg["num_tokentypes"], {}, {}
    position = same("embedding.position.weight", _PLACES, padded=True)
    if family == "roberta":
        position = Rule(position.ours, (Part(_ROWS, 0, OFFSET), Part(_PLACES, OFFSET)), padded=True)
        made[_ROWS] = Made(torch.zeros(OFFSET, cfg["hidden_size"]), needed=False)
    if (family == "roberta" and types != 1) or not types:
        raise ConfigError(
            f"model.cfg.num_tokentypes={types} is not built for UER-py's {family}; {1 if family == 'roberta' else 2} is"
        )
    rules = [
        *_rules(cfg),
        position,
        Rule("embedding.token_type.weight", (Part(_SEGMENTS, 0, types, _LEFT[family]),), padded=True),
        *linear("embedding.norm", "embedding.layer_norm", _NORM),
    ]
    if target.endswith("Classifier"):
        rules += linear("head.pooler.dense", "output_layer_1") + linear("head.classes", "output_layer_2")
    elif not target.endswith("Features"):
        rules += [
            *linear("head.transform", "target.mlm.linear_1"),
            *linear("head.transform_norm", "target.mlm.layer_norm", _NORM),
            same("head.logits.bias", "target.mlm.linear_2.bias", padded=True),
        ]
        copies = {"target.mlm.linear_2.weight": _WORDS}
        if cfg["sentence_objective"]:
            rules += linear("head.pooler.dense", "target.sp.linear_1") + linear("head.sentence", "target.sp.linear_2")
    elif cfg["pooler"]:
        raise ConfigError("model.cfg.pooler=true: UER-py's encoder without a target has no pooler")
    return Plan(Table(tuple(rules), copies=copies, old_names=OLD_NAMES), made, rows={_SEGMENTS: 3})


_MARK = r"encoder\.(transformer|block)\.0\.self_attn\.linear_layers"


def _write_settings(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    hidden, gpt = cfg["hidden_size"], target == FAMILIES["gpt2"]
    acts = {"gelu": "gelu", "gelu_tanh": "gelu_fast", "relu": "relu", "silu": "silu"}
    if cfg["activation"] not in acts:
        raise ConfigError(f"model.cfg.activation={cfg['activation']!r}: UER-py has {', '.join(acts)}")
    targets = ["lm"] if gpt else ["mlm", "sp"] if cfg.get("sentence_objective") else ["mlm"]
    return {
        "emb_size": hidden, "hidden_size": hidden, "feedforward_size": cfg["ffn_hidden_size"] or 4 * hidden,
        "hidden_act": acts[cfg["activation"]], "heads_num": cfg["num_attention_heads"], "layers_num": cfg["hidden_layers"],
        "max_seq_length": cfg["max_seq_length"], "dropout": cfg["output_dropout_prob"],
        "embedding": ["word", "pos"] if gpt else ["word", "pos", "seg"], "encoder": "transformer", "target": targets,
        "mask": "causal" if gpt else "fully_visible", "layernorm_positioning": "pre" if gpt else "post",
        "remove_embedding_layernorm": gpt, "tie_weights": cfg.get("tie_word_embeddings", True),
    }  # fmt: skip


_SAVED: dict[str, Any] = {
    "settings": tuple(SETTINGS), "writes_copies": True, "norm_factor": lambda width: math.sqrt((width - 1) / width),
    "write_settings": _write_settings,
}  # fmt: skip
UER = Format("uer", _MARK, _describe, _plan, **_SAVED)
TENCENTPRETRAIN = Format("tencentpretrain", _MARK, _describe, _plan, **_SAVED)
