"""fairseq's RoBERTa and `transformer_lm` (https://github.com/facebookresearch/fairseq), the second one as a GPT-2.

What GPT-2 has no setting for goes into its weights: sines of positions become rows of the position table, and where fairseq multiplies
embedded words by √width, the word table is multiplied, and the head gets the table as it was.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dufu.errors import ConfigError, NotBuiltError, nearest
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
    refuse_setting,
    shape_of,
    told,
)  # fmt: skip
from dufu.interchange.formats.reading import open_any
from dufu.interchange.tensor_file import PickledFile
from dufu.models.names import Part, Rule, Shape, Table, each, joined, same
from dufu.models.roberta.model import OFFSET

_ENCODER = "encoder.sentence_encoder"
_HEAD = "sentence_classification_head"  # fairseq's own name of it
OLD_NAMES = (
    (r"^module\.", ""),
    (r"^decoder\.(sentence_encoder|lm_head)\.", r"encoder.\1."),
    (r"\.layernorm_embedding\.", ".emb_layer_norm."),
    (r"\.in_proj_(weight|bias)$", r".in_proj.\1"),
    (r"^decoder\.embed_out$", "decoder.output_projection.weight"),
)
SETTINGS = (
    "activation_fn", "dropout", "attention_dropout", "no_scale_embedding", "decoder_learned_pos", "max_target_positions",
    "tokens_per_sample", "decoder_attention_heads", "encoder_attention_heads", "share_decoder_input_output_embed", "arch", "head",
    "pooler_activation_fn", "pooler_dropout",
)  # fmt: skip
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh"}
_WORDS, _PLACES, _SCORES = "decoder.embed_tokens.weight", "decoder.embed_positions.weight", "decoder.output_projection.weight"
_TYPES, _SINES = "(a table of segments)", "(sines of positions)"


def _open(path: Path) -> Source:
    files = open_any(path)
    source = Source(path, files)
    if isinstance(files[0], PickledFile):
        cfg = files[0].content.get("cfg")
        args = cfg.get("model", cfg) if isinstance(cfg, dict) else files[0].content.get("args")
        named = vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, dict) else {}
        source.settings = {str(name): value for name, value in named.items() if isinstance(value, (int, float, str, bool))}
    return source


def _activation(source: Source) -> Any:
    def take(name: str) -> str:
        if name not in _ACTIVATIONS:
            raise ConfigError(f"{source.path}: activation_fn={name!r} is not built; {', '.join(_ACTIVATIONS)} are")
        return _ACTIVATIONS[name]

    return take


def _describe(source: Source, family: str) -> Found:
    shapes = source.shapes(OLD_NAMES)
    encoder = any(name.startswith(f"{_ENCODER}.") for name in shapes)
    family = choose_family(family, ("roberta",) if encoder else ("gpt2",), source.path)
    root, side = (_ENCODER, "encoder") if encoder else ("decoder", "decoder")
    words = shape_of(shapes, f"{root}.embed_tokens.weight", source.path)
    cfg: dict[str, Any] = {
        "vocab_size": words[0],
        "hidden_size": words[1],
        "hidden_layers": count_layers(shapes, rf"{root}\.layers\.(\d+)\.", source.path),
        "ffn_hidden_size": shape_of(shapes, f"{root}.layers.0.fc1.weight", source.path)[0],
        "num_attention_heads": source.setting(f"{side}_attention_heads", source.setting("num_attention_heads")),
        "layernorm_epsilon": 1e-5,
    }
    agree(
        source,
        cfg,
        **{f"{side}_layers": "hidden_layers", f"{side}_embed_dim": "hidden_size", f"{side}_ffn_embed_dim": "ffn_hidden_size"},
    )
    notes = add_unseen(family, cfg, source.setting("size", ""))
    notes += told(
        source, cfg, "activation", "activation_fn", "gelu" if encoder else "relu", "fairseq's default", _activation(source)
    )
    for ours, theirs, default in (
        ("embedding_dropout_prob", "dropout", 0.1), ("output_dropout_prob", "dropout", 0.1),
        ("attention_dropout_prob", "attention_dropout", 0.1 if encoder else 0.0),
    ):  # fmt: skip
        notes += told(source, cfg, ours, theirs, default, "fairseq's default")
    if encoder:
        cfg["max_seq_length"] = shape_of(shapes, f"{root}.embed_positions.weight", source.path)[0] - OFFSET
        return _roberta(source, shapes, cfg, notes)
    return _language_model(source, shapes, cfg, notes)


def _roberta(source: Source, shapes: Mapping[str, Shape], cfg: dict[str, Any], notes: list[str]) -> Found:
    refuse_setting(source, "untie_weights_roberta", False)
    cfg["num_tokentypes"] = 1
    heads = sorted({name.split(".")[1] for name in shapes if name.startswith("classification_heads.")})
    asked = source.setting("head", heads[0] if len(heads) == 1 and "encoder.lm_head.bias" not in shapes else None)
    if asked is not None and asked not in heads:
        raise ConfigError(f"{source.path}: head={asked}: no such classification head{nearest(str(asked), heads)}")
    if asked is not None:
        return _classifier(source, shapes, cfg, asked, notes)
    if "encoder.lm_head.dense.weight" in shapes:
        return Found(FAMILIES["roberta"], {**cfg, "sentence_objective": False}, notes)
    return Found(f"{FAMILIES['roberta']}Features", {**cfg, "pooler": False}, notes)


def _classifier(source: Source, shapes: Mapping[str, Shape], cfg: dict[str, Any], name: str, notes: list[str]) -> Found:
    labels = shape_of(shapes, f"classification_heads.{name}.out_proj.weight", source.path)[0]
    refuse_setting(source, "pooler_activation_fn", "tanh")
    notes += told(source, cfg, "classifier_dropout_prob", "pooler_dropout", 0.0, "fairseq's default")
    left = sorted({n.split(".")[1] for n in shapes if n.startswith("classification_heads.")} - {name})
    left += ["lm_head"] if "encoder.lm_head.bias" in shapes else []
    notes += [f"the head {name} is taken; left out: {', '.join(left)}"] if left else []
    return Found(f"{FAMILIES['roberta']}Classifier", {**cfg, "num_labels": labels}, notes)


def _language_model(source: Source, shapes: Mapping[str, Shape], cfg: dict[str, Any], notes: list[str]) -> Found:
    for name in ("adaptive_input", "character_embeddings", "no_token_positional_embeddings", "layernorm_embedding"):
        refuse_setting(source, name, False)
    if "decoder.layer_norm.weight" not in shapes:
        raise NotBuiltError(f"{source.path}: a language model without a norm after its last layer is not built")
    scaled = source.setting("no_scale_embedding")
    if scaled is None:
        raise ConfigError(
            f"{source.path}: the weights do not show no_scale_embedding; give no_scale_embedding=true, or false (fairseq's default) for "
            f"words that are multiplied by √width"
        )
    tied = _SCORES not in shapes or bool(source.setting("share_decoder_input_output_embed", False))
    learned = shapes.get(_PLACES)
    length = learned[0] - OFFSET if learned else source.setting("max_target_positions", source.setting("tokens_per_sample"))
    cfg["max_seq_length"] = source.given.get("max_seq_length", length)
    if cfg["max_seq_length"] is None:
        raise ConfigError(f"{source.path}: positions are sines, which go on for ever; give max_seq_length=NUMBER")
    if not learned:
        notes.append(f"the sines of {cfg['max_seq_length']} positions become rows of a position table")
    if not scaled and not source.setting("no_scale_embedding"):
        notes.append("the word table is multiplied by √width, as fairseq does when it embeds; the head keeps the table as it was")
        tied = False
    return Found(FAMILIES["gpt2"], {**cfg, "tie_word_embeddings": tied}, notes)


def _layer_rules(number: int, root: str, cfg: Mapping[str, Any], joint: bool) -> Sequence[Rule]:
    ours, theirs, hidden = f"layers.{number}.block", f"{root}.layers.{number}", cfg["hidden_size"]
    fused: list[Rule] = []
    for leaf in LEAVES:
        name = f"{ours}.attention.query_key_value.{leaf}"
        parts = [(f"{theirs}.self_attn.{kind}_proj.{leaf}", hidden) for kind in "qkv"]
        fused.append(same(name, f"{theirs}.self_attn.in_proj.{leaf}") if joint else joined(name, parts))
    return [
        *fused,
        *linear(f"{ours}.attention.output", f"{theirs}.self_attn.out_proj"),
        *linear(f"{ours}.attention_norm", f"{theirs}.self_attn_layer_norm"),
        *linear(f"{ours}.mlp.expand", f"{theirs}.fc1"),
        *linear(f"{ours}.mlp.contract", f"{theirs}.fc2"),
        *linear(f"{ours}.mlp_norm", f"{theirs}.final_layer_norm"),
    ]


def _plan(target: str, cfg: Mapping[str, Any], source: Source | None) -> Plan:
    shapes = {} if source is None else source.shapes(OLD_NAMES)
    joint = any(name.endswith(".in_proj.weight") for name in shapes)
    if target == FAMILIES["gpt2"] and not cfg["num_experts"]:
        return _plan_language_model(cfg, source, shapes, joint)
    if target not in (FAMILIES["roberta"], f"{FAMILIES['roberta']}Features", f"{FAMILIES['roberta']}Classifier"):
        raise ConfigError(f"{target} has no form in fairseq's format here; {FAMILIES['roberta']} and {FAMILIES['gpt2']} have")
    if not cfg["apply_residual_post_layernorm"] or cfg.get("sentence_objective") or cfg.get("pooler"):
        raise ConfigError("fairseq's RoBERTa has no pooler, no sentence objective, and norms after each sum")
    types = [] if not cfg["num_tokentypes"] else [Rule("embedding.token_type.weight", (Part(_TYPES),))]
    rules = [
        same("embedding.word.weight", f"{_ENCODER}.embed_tokens.weight"),
        same("embedding.position.weight", f"{_ENCODER}.embed_positions.weight"),
        *types,
        *linear("embedding.norm", f"{_ENCODER}.emb_layer_norm"),
        *each(cfg["hidden_layers"], lambda number: _layer_rules(number, _ENCODER, cfg, joint)),
    ]
    made = {_TYPES: Made(torch.zeros(cfg["num_tokentypes"], cfg["hidden_size"]))} if types else {}
    copies = {}
    if target == FAMILIES["roberta"]:
        rules += [
            *linear("head.transform", "encoder.lm_head.dense"),
            *linear("head.transform_norm", "encoder.lm_head.layer_norm"),
            same("head.logits.bias", "encoder.lm_head.bias"),
        ]
        copies = {"encoder.lm_head.weight": f"{_ENCODER}.embed_tokens.weight"}
    head = (
        _HEAD if source is None else source.setting("head", next((n.split(".")[1] for n in shapes if n.startswith("class")), _HEAD))
    )
    ignored: tuple[str, ...] = (r"encoder\.(sentence_encoder\.)?(version|.*_float_tensor)",)
    if target.endswith("Classifier"):
        rules += linear("head.pooler.dense", f"classification_heads.{head}.dense")
        rules += linear("head.classes", f"classification_heads.{head}.out_proj")
        ignored += (r"encoder\.lm_head\..*", rf"classification_heads\.(?!{re.escape(head)}\.).*")
    return Plan(Table(tuple(rules), ignored, copies, old_names=OLD_NAMES), made)


def sines(length: int, width: int) -> Tensor:
    """Return what fairseq adds at each position: all sines, then all cosines; the first position is the one after the padding's, 2."""
    half = width // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(OFFSET, length + OFFSET, dtype=torch.float).unsqueeze(1) * rates
    return torch.cat([angles.sin(), angles.cos(), torch.zeros(length, width % 2)], 1)


def _plan_language_model(cfg: Mapping[str, Any], source: Source | None, shapes: Mapping[str, Shape], joint: bool) -> Plan:
    tied, hidden = cfg["tie_word_embeddings"], cfg["hidden_size"]
    scaled = source is not None and not source.setting("no_scale_embedding")
    sinusoidal = source is not None and _PLACES not in shapes
    place = Part(_SINES) if sinusoidal else Part(_PLACES, 0, cfg["max_seq_length"], OFFSET)
    head = (
        _WORDS if scaled and (_SCORES not in shapes or (source and source.setting("share_decoder_input_output_embed"))) else _SCORES
    )
    rules = [
        same("embedding.word.weight", _WORDS),
        Rule("embedding.position.weight", (place,)),
        *each(cfg["hidden_layers"], lambda number: _layer_rules(number, "decoder", cfg, joint)),
        *linear("head.norm", "decoder.layer_norm"),
        *([] if tied else [same("head.word.weight", head)]),
    ]
    made = {_SINES: Made(sines(cfg["max_seq_length"], hidden))} if sinusoidal else {}
    copies = {_SCORES: _WORDS} if tied or head == _WORDS else {}
    factors = {"embedding.word.weight": math.sqrt(hidden)} if scaled else {}
    table = Table(tuple(rules), (r"decoder\.(version|.*_float_tensor)",), copies, old_names=OLD_NAMES)
    return Plan(table, made, factors)


def _wrap(tensors: dict[str, Tensor], target: str, cfg: Mapping[str, Any]) -> Any:
    side = "decoder" if target == FAMILIES["gpt2"] else "encoder"
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items() if theirs != "gelu_fast"}
    if cfg["activation"] not in names:
        raise ConfigError(f"model.cfg.activation={cfg['activation']!r}: fairseq has {', '.join(names)}")
    if cfg["layernorm_epsilon"] != 1e-5:
        raise ConfigError(f"model.cfg.layernorm_epsilon={cfg['layernorm_epsilon']}: fairseq's norms add 1e-05")
    args = {
        "arch": "transformer_lm" if side == "decoder" else "roberta", f"{side}_layers": cfg["hidden_layers"],
        f"{side}_embed_dim": cfg["hidden_size"], f"{side}_ffn_embed_dim": cfg["ffn_hidden_size"] or 4 * cfg["hidden_size"],
        f"{side}_attention_heads": cfg["num_attention_heads"], "activation_fn": names[cfg["activation"]],
        "dropout": cfg["output_dropout_prob"], "attention_dropout": cfg["attention_dropout_prob"],
        "tokens_per_sample": cfg["max_seq_length"],
    }  # fmt: skip
    if side == "decoder":
        args |= {
            "task": "language_modeling", "max_target_positions": cfg["max_seq_length"], "no_scale_embedding": True,
            "decoder_learned_pos": True, "share_decoder_input_output_embed": cfg["tie_word_embeddings"], "decoder_normalize_before": True,
        }  # fmt: skip
    else:
        args |= {
            "task": "masked_lm",
            "max_positions": cfg["max_seq_length"],
            "pooler_activation_fn": "tanh",
            "pooler_dropout": cfg.get("classifier_dropout_prob", 0.0),
        }
    return {"args": argparse.Namespace(**args), "model": tensors}


FAIRSEQ = Format(
    "fairseq", r"^(module\.)?(encoder|decoder)\.(sentence_encoder\.)?embed_tokens\.weight", _describe, _plan, _open, _wrap,
    settings=SETTINGS, writes_copies=True,
)  # fmt: skip
