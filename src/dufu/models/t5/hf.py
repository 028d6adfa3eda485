"""T5's and mT5's config.json and names in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.errors import CheckpointError, ConfigError
from dufu.models.hf import ACTIVATIONS, Family, Fields, activation_name, refuse_unless
from dufu.models.names import Rule, Table, each, joined, same

T5, MT5 = "dufu.models.t5.T5", "dufu.models.t5.MT5"
_DROPOUTS = ("embedding_dropout_prob", "attention_dropout_prob", "activation_dropout_prob", "output_dropout_prob")
_HEADS = ("", "T5ForConditionalGeneration", "MT5ForConditionalGeneration", "T5WithLMHeadModel", "T5Model", "MT5Model")


def _read(fields: Fields) -> tuple[str, dict[str, Any]]:
    target = MT5 if fields.values.get("model_type") == "mt5" else T5
    if fields.architecture not in _HEADS:
        raise CheckpointError(
            f"{fields.where}: {fields.architecture} is not built; dufu has T5 and mT5 with a language model's head"
        )
    layers, dropout = fields.whole("num_layers", 8 if target == MT5 else 6), fields.take("dropout_rate", 0.1)
    gated, activation = _feed_forward(fields, "gated-gelu" if target == MT5 else "relu")
    cfg = {
        "vocab_size": fields.whole("vocab_size", 250112 if target == MT5 else 32128),
        "hidden_layers": layers,
        "decoder_layers": fields.whole("num_decoder_layers", layers),
        "hidden_size": fields.whole("d_model", 512),
        "ffn_hidden_size": fields.whole("d_ff", 1024 if target == MT5 else 2048),
        "num_attention_heads": fields.whole("num_heads", 6 if target == MT5 else 8),
        "head_size": fields.whole("d_kv", 64),
        "max_seq_length": fields.whole("n_positions", 1024 if target == MT5 else 512),
        "relative_attention_num_buckets": fields.whole("relative_attention_num_buckets", 32),
        "relative_attention_max_distance": fields.whole("relative_attention_max_distance", 128),
        **dict.fromkeys(_DROPOUTS, dropout),
        "layernorm_epsilon": fields.take("layer_norm_epsilon", 1e-6),
        "initializer_factor": fields.take("initializer_factor", 1.0),
        "activation": activation,
        "gated_mlp": gated,
        "tie_word_embeddings": fields.take("tie_word_embeddings", True),
        "decoder_start_token_id": fields.take("decoder_start_token_id", fields.take("pad_token_id", 0)),
    }
    if target == T5:
        # Files from before the field scale where the head is tied, and only there.
        cfg["scale_decoder_outputs"] = fields.take("scale_decoder_outputs", cfg["tie_word_embeddings"])
    fields.expect("is_decoder", False)
    fields.ignore("classifier_dropout", "output_past", "num_hidden_layers")
    return target, cfg


def _feed_forward(fields: Fields, default: str) -> tuple[bool, str]:
    """Return whether the feed-forward part is gated, and our name of its activation."""
    value = str(fields.take("feed_forward_proj", default))
    *gated, theirs = value.split("-", 1)
    # "gated-gelu" has always meant the approximation by tanh.
    theirs = "gelu_new" if value == "gated-gelu" else theirs
    if gated not in ([], ["gated"]) or theirs not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise CheckpointError(f"{fields.where}: feed_forward_proj={value!r}: one of {known}, or gated-, followed by one")
    fields.expect("dense_act_fn", theirs)
    fields.expect("is_gated_act", bool(gated))
    return bool(gated), ACTIVATIONS[theirs]


def _write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    kind = "mT5" if target == MT5 else "T5"
    refuse_unless(cfg, kind, **dict.fromkeys(_DROPOUTS, cfg["output_dropout_prob"]))
    tied = cfg["tie_word_embeddings"]
    given = cfg.get("scale_decoder_outputs", False)
    scaled = tied if given is None else given
    if scaled and not tied:
        raise ConfigError(f"model.cfg.scale_decoder_outputs=true with a head of its own: Hugging Face's {kind} has no such setting")
    name = activation_name(cfg["activation"])
    if cfg["gated_mlp"]:
        if name == "gelu":
            raise ConfigError(f'model.cfg.activation="gelu" with a gate: Hugging Face\'s {kind} computes gelu_tanh by that name')
        name = "gated-gelu" if name == "gelu_new" else f"gated-{name}"
    start = cfg["decoder_start_token_id"]
    return {
        "model_type": kind.lower(),
        "architectures": [f"{'MT5' if target == MT5 else 'T5'}ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": cfg["vocab_size"] + cfg["extra_ids"],
        "num_layers": cfg["hidden_layers"],
        "num_decoder_layers": cfg["hidden_layers"] if cfg["decoder_layers"] is None else cfg["decoder_layers"],
        "d_model": cfg["hidden_size"],
        "d_ff": cfg["ffn_hidden_size"] or 4 * cfg["hidden_size"],
        "num_heads": cfg["num_attention_heads"],
        "d_kv": cfg["head_size"] or cfg["hidden_size"] // cfg["num_attention_heads"],
        "n_positions": cfg["max_seq_length"],
        "relative_attention_num_buckets": cfg["relative_attention_num_buckets"],
        "relative_attention_max_distance": cfg["relative_attention_max_distance"],
        "dropout_rate": cfg["output_dropout_prob"],
        "layer_norm_epsilon": cfg["layernorm_epsilon"],
        "initializer_factor": cfg["initializer_factor"],
        "feed_forward_proj": name,
        "tie_word_embeddings": tied,
        **({} if target == MT5 else {"scale_decoder_outputs": scaled}),
        **({} if start is None else {"decoder_start_token_id": start}),
    }


def _table(target: str, cfg: Mapping[str, Any]) -> Table:
    features = cfg["head_size"] or cfg["hidden_size"] // cfg["num_attention_heads"]
    width, inner = cfg["num_attention_heads"] * features, cfg["ffn_hidden_size"] or 4 * cfg["hidden_size"]

    def layer(side: str, number: int) -> list[Rule]:
        mine, theirs, last = f"{side}.layers.{number}", f"{side}.block.{number}.layer", 2 if side == "decoder" else 1
        own, ff = f"{theirs}.0.SelfAttention", f"{theirs}.{last}.DenseReluDense"
        rules = [
            same(f"{mine}.block.attention_norm.weight", f"{theirs}.0.layer_norm.weight"),
            joined(f"{mine}.block.attention.query_key_value.weight", [(f"{own}.{x}.weight", width) for x in "qkv"]),
            same(f"{mine}.block.attention.output.weight", f"{own}.o.weight"),
            same(f"{mine}.block.mlp_norm.weight", f"{theirs}.{last}.layer_norm.weight"),
            same(f"{mine}.block.mlp.contract.weight", f"{ff}.wo.weight"),
        ]
        if cfg["gated_mlp"]:
            rules.append(joined(f"{mine}.block.mlp.gate_up.weight", [(f"{ff}.wi_0.weight", inner), (f"{ff}.wi_1.weight", inner)]))
        else:
            rules.append(same(f"{mine}.block.mlp.expand.weight", f"{ff}.wi.weight"))
        if number == 0:
            rules.append(same(f"{mine}.relative.weight", f"{own}.relative_attention_bias.weight"))
        if side == "decoder":
            cross = f"{theirs}.1.EncDecAttention"
            rules += [
                same(f"{mine}.block.cross_norm.weight", f"{theirs}.1.layer_norm.weight"),
                same(f"{mine}.block.cross_attention.query.weight", f"{cross}.q.weight"),
                joined(f"{mine}.block.cross_attention.key_value.weight", [(f"{cross}.{x}.weight", width) for x in "kv"]),
                same(f"{mine}.block.cross_attention.output.weight", f"{cross}.o.weight"),
            ]
        return rules

    shared = "shared.weight"
    copies = {"encoder.embed_tokens.weight": shared, "decoder.embed_tokens.weight": shared}
    rules = [same("encoder.embedding.word.weight", shared)]
    if cfg["tie_word_embeddings"]:
        copies["lm_head.weight"] = shared
    else:
        rules.append(same("head.word.weight", "lm_head.weight"))
    count = cfg["hidden_layers"] if cfg["decoder_layers"] is None else cfg["decoder_layers"]
    rules += each(cfg["hidden_layers"], lambda i: layer("encoder", i))
    rules += each(count, lambda i: layer("decoder", i))
    rules += [same(f"{side}.norm.norm.weight", f"{side}.final_layer_norm.weight") for side in ("encoder", "decoder")]
    # Old files hold a bias for cross attention, which no version reads.
    ignored = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)
    return Table(tuple(rules), ignored, copies)


FAMILY = Family((T5, MT5), _read, _write, _table)
