"""BART's and mBART's config.json and names in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.errors import CheckpointError
from dufu.models.hf import Family, Fields, activation_name, refuse_unless
from dufu.models.names import Rule, Table, each, joined, same, turned

BART = "dufu.models.bart.Bart"
_CLASSES = ("ForConditionalGeneration", "Model")
# Settings of versions before 4, which the published files still carry: what each means today.
_OLD = {
    "normalize_embedding": (True,),
    "static_position_embeddings": (False,),
    "add_bias_logits": (False,),
    "extra_pos_embeddings": (2,),
}


def _read(fields: Fields) -> tuple[str, dict[str, Any]]:
    many = fields.values.get("model_type") == "mbart"
    prefix = "MBart" if many else "Bart"
    if fields.architecture not in ("", *(f"{prefix}{kind}" for kind in _CLASSES), f"Pretrained{prefix}Model"):
        raise CheckpointError(f"{fields.where}: {fields.architecture} is not built; dufu has {prefix}ForConditionalGeneration")
    layers, inner = fields.whole("encoder_layers", 12), fields.whole("encoder_ffn_dim", 4096)
    heads, dropout = fields.whole("encoder_attention_heads", 16), fields.take("dropout", 0.1)
    cfg = {
        "vocab_size": fields.whole("vocab_size", 50265),
        "hidden_layers": layers,
        "decoder_layers": fields.whole("decoder_layers", 12),
        "hidden_size": fields.whole("d_model", 1024),
        "ffn_hidden_size": inner,
        "decoder_ffn_hidden_size": fields.whole("decoder_ffn_dim", 4096),
        "num_attention_heads": heads,
        "decoder_attention_heads": fields.whole("decoder_attention_heads", 16),
        "max_seq_length": fields.whole("max_position_embeddings", 1024),
        "embedding_dropout_prob": dropout,
        "attention_dropout_prob": fields.take("attention_dropout", 0.0),
        "activation_dropout_prob": fields.take("activation_dropout", 0.0),
        "output_dropout_prob": dropout,
        "initializer_range": fields.take("init_std", 0.02),
        "activation": fields.activation("activation_function", "gelu"),
        "apply_residual_post_layernorm": not many,
        "scale_embedding": bool(fields.take("scale_embedding", False)),
        "pad_token_id": fields.take("pad_token_id", 1),
        "decoder_start_token_id": fields.take("decoder_start_token_id", None if many else 2),
    }
    for name in ("normalize_before", "add_final_layer_norm"):
        fields.expect(name, many)
    for name, allowed in _OLD.items():
        fields.expect(name, *allowed)
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        fields.expect(name, 0.0)
    fields.expect("tie_word_embeddings", True)
    fields.expect("is_decoder", False)
    fields.ignore("num_hidden_layers", "classifier_dropout", "classif_dropout", "output_past", "save_step", "do_blenderbot_90_layernorm",
                  "force_bos_token_to_be_generated", "add_cross_attention")  # fmt: skip
    return BART, cfg


def _write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    many = not cfg["apply_residual_post_layernorm"]
    kind = "mBART" if many else "BART"
    refuse_unless(cfg, kind, layernorm_epsilon=1e-5, embedding_dropout_prob=cfg["output_dropout_prob"])
    inner, start = cfg["ffn_hidden_size"] or 4 * cfg["hidden_size"], cfg["decoder_start_token_id"]
    return {
        "model_type": kind.lower(),
        "architectures": [f"{'MBart' if many else 'Bart'}ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": cfg["vocab_size"] + cfg["extra_ids"],
        "encoder_layers": cfg["hidden_layers"],
        "decoder_layers": cfg["hidden_layers"] if cfg["decoder_layers"] is None else cfg["decoder_layers"],
        "d_model": cfg["hidden_size"],
        "encoder_ffn_dim": inner,
        "decoder_ffn_dim": cfg["decoder_ffn_hidden_size"] or inner,
        "encoder_attention_heads": cfg["num_attention_heads"],
        "decoder_attention_heads": cfg["decoder_attention_heads"] or cfg["num_attention_heads"],
        "max_position_embeddings": cfg["max_seq_length"],
        "dropout": cfg["output_dropout_prob"],
        "attention_dropout": cfg["attention_dropout_prob"],
        "activation_dropout": cfg["activation_dropout_prob"],
        "init_std": cfg["initializer_range"],
        "activation_function": activation_name(cfg["activation"]),
        "scale_embedding": cfg["scale_embedding"],
        "tie_word_embeddings": True,
        "pad_token_id": cfg["pad_token_id"],
        **({} if start is None else {"decoder_start_token_id": start}),
    }


def _linear(mine: str, theirs: str) -> list[Rule]:
    return [same(f"{mine}.{leaf}", f"{theirs}.{leaf}") for leaf in ("weight", "bias")]


def _table(target: str, cfg: Mapping[str, Any]) -> Table:
    hidden = cfg["hidden_size"]

    def layer(side: str, number: int) -> list[Rule]:
        mine, theirs = f"{side}.layers.{number}.block", f"model.{side}.layers.{number}"
        rules = [
            *_linear(f"{mine}.attention_norm", f"{theirs}.self_attn_layer_norm"),
            *_linear(f"{mine}.attention.output", f"{theirs}.self_attn.out_proj"),
            *_linear(f"{mine}.mlp_norm", f"{theirs}.final_layer_norm"),
            *_linear(f"{mine}.mlp.expand", f"{theirs}.fc1"),
            *_linear(f"{mine}.mlp.contract", f"{theirs}.fc2"),
        ]
        for leaf in ("weight", "bias"):
            parts = [(f"{theirs}.self_attn.{x}_proj.{leaf}", hidden) for x in "qkv"]
            rules.append(joined(f"{mine}.attention.query_key_value.{leaf}", parts))
        if side == "decoder":
            rules += [
                *_linear(f"{mine}.cross_norm", f"{theirs}.encoder_attn_layer_norm"),
                *_linear(f"{mine}.cross_attention.query", f"{theirs}.encoder_attn.q_proj"),
                *_linear(f"{mine}.cross_attention.output", f"{theirs}.encoder_attn.out_proj"),
            ]
            for leaf in ("weight", "bias"):
                parts = [(f"{theirs}.encoder_attn.{x}_proj.{leaf}", hidden) for x in "kv"]
                rules.append(joined(f"{mine}.cross_attention.key_value.{leaf}", parts))
        return rules

    shared = "model.shared.weight"
    rules = [same("encoder.embedding.word.weight", shared), turned("head.logits.bias", "final_logits_bias")]
    for side, count in (("encoder", cfg["hidden_layers"]), ("decoder", cfg["decoder_layers"])):
        rules.append(same(f"{side}.embedding.position.weight", f"model.{side}.embed_positions.weight"))
        rules += _linear(f"{side}.embedding.norm", f"model.{side}.layernorm_embedding")
        rules += each(cfg["hidden_layers"] if count is None else count, lambda i, side=side: layer(side, i))  # type: ignore[misc]
        if not cfg["apply_residual_post_layernorm"]:
            rules += _linear(f"{side}.norm.norm", f"model.{side}.layer_norm")
    return Table(
        tuple(rules),
        ignored=(r"(model\.)?(encoder|decoder)\.version",),
        copies=dict.fromkeys(("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"), shared),
        prefix="model.",
        optional=("head.logits.bias",),  # zeros where a file lacks it
    )


FAMILY = Family((BART,), _read, _write, _table)
