"""Megatron-LM's GPT and BERT (https://github.com/NVIDIA/Megatron-LM): `model_optim_rng.pt`, whole or of tensor-parallel processes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dufu.errors import CheckpointError, ConfigError, NotBuiltError
from dufu.interchange.formats.base import (
    FAMILIES,
    LEAVES,
    Format,
    Found,
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
from dufu.interchange.formats.fused import fused
from dufu.interchange.formats.reading import Split, open_pickled
from dufu.interchange.tensor_file import PickledFile, TensorFile
from dufu.models.names import Rule, Table, each, same

_FILE, _LATEST, _MULTIPLE = "model_optim_rng.pt", "latest_checkpointed_iteration.txt", 128
_TOP, _LAYER = "language_model.encoder", r"language_model\.encoder\.layers\.(\d+)\."
# Older names, those of layers that hold their norms (Transformer Engine), and those of Megatron Core.
OLD_NAMES = (
    (r"^module\.", ""),
    (r"^(embedding|output_layer)\.", r"language_model.\1."),
    (r"^decoder\.", f"{_TOP}."),
    (r"^language_model\.transformer\.", f"{_TOP}."),
    (r"\.final_norm\.", ".final_layernorm."),
    (r"\.(\d+)\.attention\.", r".\1.self_attention."),
    (r"\.self_attention\.(layernorm_qkv|linear_qkv)\.layer_norm_", ".input_layernorm."),
    (r"\.self_attention\.(layernorm_qkv|linear_qkv)\.", ".self_attention.query_key_value."),
    (r"\.self_attention\.(proj|linear_proj)\.", ".self_attention.dense."),
    (r"\.(mlp\.linear_fc1|layernorm_mlp)\.layer_norm_", ".post_attention_layernorm."),
    (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
    (r"\.mlp\.linear_fc1\.|\.layernorm_mlp\.fc1_", ".mlp.dense_h_to_4h."),
    (r"\.mlp\.linear_fc2\.|\.layernorm_mlp\.fc2_", ".mlp.dense_4h_to_h."),
)
SETTINGS = (
    "checkpoint_version", "num_layers", "ffn_hidden_size", "max_position_embeddings", "padded_vocab_size", "openai_gelu",
    "bias_gelu_fusion", "squared_relu", "layernorm_epsilon", "norm_epsilon", "hidden_dropout", "attention_dropout", "init_method_std",
    "swiglu", "kv_channels", "apply_layernorm_1p", "normalization", "position_embedding_type", "num_experts", "group_query_attention",
    "apply_residual_connection_post_layernorm", "add_position_embedding",
)  # fmt: skip
_ALONG = (
    (re.compile(r"(word_embeddings|output_layer)\.weight$|^lm_head\.bias$"), 0),
    (re.compile(r"(query_key_value|layernorm_qkv|linear_qkv|dense_h_to_4h|linear_fc1)\.(weight|bias)$|fc1_(weight|bias)$"), 0),
    (re.compile(r"(attention\.dense|attention\.proj|linear_proj|dense_4h_to_h|linear_fc2)\.weight$|fc2_weight$"), 1),
)


def _along(name: str) -> int | None:
    """Return the dimension that tensor parallelism divides."""
    return next((dim for pattern, dim in _ALONG if pattern.search(name)), None)


def _shard_paths(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path}: missing")
    folder = path
    if (path / _LATEST).is_file():
        word = (path / _LATEST).read_text(encoding="utf-8").strip()
        if word != "release" and not word.isdecimal():
            raise CheckpointError(f"{path / _LATEST}: {word!r} is neither a number nor release")
        folder = path / (word if word == "release" else f"iter_{int(word):07d}")
    if (folder / _FILE).is_file():
        return [folder / _FILE]
    found = sorted(folder.glob(f"mp_rank_*/{_FILE}"))
    if not found:
        raise CheckpointError(f"{folder}: holds no mp_rank_…/{_FILE}")
    staged = [p.parent.name for p in found if not re.fullmatch(r"mp_rank_\d+", p.parent.name)]
    if staged:
        raise NotBuiltError(
            f"{folder}: {staged[0]} is of a pipeline-parallel run, which is not built; merge the stages with its own tools"
        )
    if [p.parent.name for p in found] != [f"mp_rank_{number:02d}" for number in range(len(found))]:
        raise CheckpointError(f"{folder}: shards are missing; found {', '.join(p.parent.name for p in found[:8])}")
    return found


def _weights_alone(file: PickledFile) -> TensorFile:
    if "model0" in file.content:
        raise NotBuiltError(f"{file.path}: is of a pipeline-parallel run with interleaved stages, which is not built")
    return file


def _open(path: Path) -> Source:
    paths = _shard_paths(path)
    shards = [open_pickled(each_path) for each_path in paths]
    content = shards[0].content
    settings = _values(content.get("args"))
    settings["checkpoint_version"] = content.get("checkpoint_version", 0)
    size = settings.get("tensor_model_parallel_size", settings.get("model_parallel_size"))
    if size not in (None, len(shards)):
        raise CheckpointError(f"{path}: is one of {size} tensor-parallel shards; give the folder that holds all of them")
    files = [_weights_alone(shard) for shard in shards]
    return Source(path, files if len(files) == 1 else [Split(path, files, _along)], settings, shards=len(files))


def _values(args: Any) -> dict[str, Any]:
    """Return the plain values of a checkpoint's arguments."""
    named = vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, dict) else {}
    return {str(name): value for name, value in named.items() if isinstance(value, (int, float, str, bool))}


def _activation(source: Source) -> str | None:
    if source.setting("squared_relu"):
        return "squared_relu"
    if source.setting("openai_gelu") is None and source.setting("bias_gelu_fusion") is None:
        return None
    # The kernel that adds the bias too computes the approximation with tanh.
    return "gelu_tanh" if source.setting("openai_gelu") or source.setting("bias_gelu_fusion") else "gelu"


def _describe(source: Source, family: str) -> Found:
    shapes = source.shapes(OLD_NAMES)
    family = choose_family(family, ("bert",) if any(n.startswith("lm_head.") for n in shapes) else ("gpt2",), source.path)
    refuse_setting(source, "swiglu", False)
    refuse_setting(source, "apply_layernorm_1p", False)
    refuse_setting(source, "normalization", "LayerNorm")
    refuse_setting(source, "position_embedding_type", "learned_absolute")
    refuse_setting(source, "group_query_attention", False)
    refuse_setting(source, "num_experts", 0)
    words = shape_of(shapes, "language_model.embedding.word_embeddings.weight", source.path)
    cfg: dict[str, Any] = {
        "vocab_size": words[0],
        "hidden_size": words[1],
        "hidden_layers": count_layers(shapes, _LAYER, source.path),
        "ffn_hidden_size": shape_of(shapes, f"{_TOP}.layers.0.mlp.dense_h_to_4h.weight", source.path)[0],
        "max_seq_length": shape_of(shapes, "language_model.embedding.position_embeddings.weight", source.path)[0],
        "num_attention_heads": source.setting("num_attention_heads"),
    }
    agree(source, cfg, padded_vocab_size="vocab_size", hidden_size="hidden_size", ffn_hidden_size="ffn_hidden_size",
          num_layers="hidden_layers", max_position_embeddings="max_seq_length")  # fmt: skip
    notes = add_unseen(family, cfg, source.setting("size", ""))
    notes += told(
        source, cfg, "vocab_size", "", words[0], "all rows of the table, padding included; give vocab_size=NUMBER to cut it"
    )
    heads, channels = cfg["num_attention_heads"], source.setting("kv_channels")
    if channels is not None and channels * heads != cfg["hidden_size"]:
        raise ConfigError(f"{source.path}: kv_channels={channels} is not built; {cfg['hidden_size'] // heads} is")
    source.settings["activation"] = _activation(source)
    notes += told(source, cfg, "activation", "activation", "gelu_tanh", "what Megatron's fused kernel computes, its default")
    epsilon = source.setting("layernorm_epsilon", source.setting("norm_epsilon"))
    source.settings["layernorm_epsilon"] = epsilon
    notes += told(source, cfg, "layernorm_epsilon", "layernorm_epsilon", 1e-5, "Megatron's default")
    for ours, theirs in (
        ("embedding_dropout_prob", "hidden_dropout"), ("attention_dropout_prob", "attention_dropout"),
        ("output_dropout_prob", "hidden_dropout"),
    ):  # fmt: skip
        notes += told(source, cfg, ours, theirs, 0.1, "Megatron's default")
    if source.setting("init_method_std") is not None:
        cfg["initializer_range"] = source.setting("init_method_std")
    if family == "gpt2":
        refuse_setting(source, "apply_residual_connection_post_layernorm", False)
        return Found(FAMILIES[family], {**cfg, "tie_word_embeddings": "language_model.output_layer.weight" not in shapes}, notes)
    post = source.setting("apply_residual_connection_post_layernorm", source.given.get("apply_residual_post_layernorm"))
    if post is None:
        post = False
        notes.append("assumed apply_residual_post_layernorm=False, Megatron's default")
    types = shapes.get("language_model.embedding.tokentype_embeddings.weight")
    cfg |= {"apply_residual_post_layernorm": bool(post), "num_tokentypes": 0 if types is None else types[0]}
    return Found(FAMILIES[family], {**cfg, "sentence_objective": "binary_head.weight" in shapes}, notes)


def _order(source: Source | None) -> str:
    """Return how the rows of fused projections go; see `fused`."""
    version = 3.0 if source is None else float(source.setting("checkpoint_version", 0))
    if version >= 2:
        return "head"
    if version in (0, 1):
        return "size" if version == 1 else "kind"
    raise ConfigError(f"checkpoint_version={version}: 0, 1, 2 and above are known")


def _plan(target: str, cfg: Mapping[str, Any], source: Source | None) -> Plan:
    if target not in (FAMILIES["gpt2"], FAMILIES["bert"]) or cfg.get("num_experts"):
        raise ConfigError(f"{target} has no form in Megatron-LM's format here; {FAMILIES['gpt2']} and {FAMILIES['bert']} have")
    bert = target == FAMILIES["bert"]
    heads, hidden, last = cfg["num_attention_heads"], cfg["hidden_size"], cfg["hidden_layers"]
    order, shards = _order(source), 1 if source is None else source.shards
    if heads % shards:
        raise ConfigError(f"num_attention_heads={heads} does not divide over {shards} shards")
    post = bert and cfg["apply_residual_post_layernorm"]

    def layer(number: int) -> Sequence[Rule]:
        ours, theirs = f"layers.{number}.block", f"{_TOP}.layers.{number}"
        qkv = ("attention.query_key_value", "self_attention.query_key_value")
        ends = f"{_TOP}.layers.{number + 1}.input_layernorm" if number + 1 < last else f"{_TOP}.final_layernorm"
        middle = f"{theirs}.post_attention_layernorm"
        norms = (middle, ends) if post else (f"{theirs}.input_layernorm", middle)
        return [
            *(
                fused(f"{ours}.{qkv[0]}.{leaf}", f"{theirs}.{qkv[1]}.{leaf}", heads, hidden // heads, order, shards)
                for leaf in LEAVES
            ),
            *linear(f"{ours}.attention.output", f"{theirs}.self_attention.dense"),
            *linear(f"{ours}.mlp.expand", f"{theirs}.mlp.dense_h_to_4h"),
            *linear(f"{ours}.mlp.contract", f"{theirs}.mlp.dense_4h_to_h"),
            *linear(f"{ours}.attention_norm", norms[0]),
            *linear(f"{ours}.mlp_norm", norms[1]),
        ]

    words = "language_model.embedding.word_embeddings.weight"
    rules = [
        same("embedding.word.weight", words, padded=True),
        same("embedding.position.weight", "language_model.embedding.position_embeddings.weight"),
        *each(last, layer),
        *(linear("embedding.norm", f"{_TOP}.layers.0.input_layernorm") if post else linear("head.norm", f"{_TOP}.final_layernorm")),
    ]
    padded = -(-cfg["vocab_size"] // _MULTIPLE) * _MULTIPLE
    rows = {words: padded}
    if bert:
        if cfg["num_tokentypes"]:
            rules.append(same("embedding.token_type.weight", "language_model.embedding.tokentype_embeddings.weight"))
        rules += [
            *linear("head.transform", "lm_head.dense"),
            *linear("head.transform_norm", "lm_head.layernorm"),
            same("head.logits.bias", "lm_head.bias", padded=True),
        ]
        rows["lm_head.bias"] = padded
        if cfg["sentence_objective"]:
            rules += linear("head.pooler.dense", "language_model.pooler.dense") + linear("head.sentence", "binary_head")
    elif not cfg["tie_word_embeddings"]:
        rules.append(same("head.word.weight", "language_model.output_layer.weight", padded=True))
        rows["language_model.output_layer.weight"] = padded
    copies = {"word_embeddings_for_head.weight": words, "word_embeddings.weight": words}
    notes = (
        [f"the vocabulary is padded to {padded} rows, a multiple of {_MULTIPLE}"]
        if source is None and padded > cfg["vocab_size"]
        else []
    )
    table = Table(tuple(rules), (r".*_extra_state", r".*\.(inv_freq|core_attention\..*)"), copies, old_names=OLD_NAMES)
    return Plan(table, rows=rows, notes=notes)


def _wrap(tensors: dict[str, Tensor], target: str, cfg: Mapping[str, Any]) -> Any:
    inner: dict[str, Any] = {}
    for name, value in tensors.items():
        *path, leaf = _nested(name)
        place = inner
        for part in path:
            place = place.setdefault(part, {})
        place[leaf] = value
    gelu = cfg["activation"]
    args = {
        "num_layers": cfg["hidden_layers"], "hidden_size": cfg["hidden_size"], "ffn_hidden_size": cfg["ffn_hidden_size"] or 4 * cfg["hidden_size"],
        "num_attention_heads": cfg["num_attention_heads"], "max_position_embeddings": cfg["max_seq_length"],
        "padded_vocab_size": -(-cfg["vocab_size"] // _MULTIPLE) * _MULTIPLE, "make_vocab_size_divisible_by": _MULTIPLE,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "layernorm_epsilon": cfg["layernorm_epsilon"],
        "hidden_dropout": cfg["output_dropout_prob"], "attention_dropout": cfg["attention_dropout_prob"],
        "init_method_std": cfg["initializer_range"], "openai_gelu": False, "bias_gelu_fusion": gelu == "gelu_tanh",
        "squared_relu": gelu == "squared_relu", "position_embedding_type": "learned_absolute", "add_position_embedding": True,
        "apply_residual_connection_post_layernorm": bool(cfg.get("apply_residual_post_layernorm")),
        "untie_embeddings_and_output_weights": not cfg.get("tie_word_embeddings", True),
    }  # fmt: skip
    if gelu not in ("gelu", "gelu_tanh", "squared_relu"):
        raise ConfigError(f"model.cfg.activation={gelu!r}: Megatron-LM has gelu, gelu_tanh and squared_relu here")
    return {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 0, "model": inner}


def _nested(name: str) -> list[str]:
    """Return the keys under which Megatron keeps a tensor: dicts down to a part of the model, then one dotted name."""
    for top in (_TOP, "language_model.pooler", "language_model.output_layer", "lm_head", "binary_head"):
        if name.startswith(f"{top}."):
            return [*top.split("."), name.removeprefix(f"{top}.")]
    return name.split(".")


MEGATRON = Format(
    "megatron",
    r"(^|\.)embedding\.word_embeddings\.weight",
    _describe,
    _plan,
    _open,
    _wrap,
    f"release/mp_rank_00/{_FILE}",
    SETTINGS,
    beside={_LATEST: "release\n"},
)
