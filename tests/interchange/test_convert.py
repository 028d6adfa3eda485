"""Other programs' checkpoints become folders whose model computes what theirs does, and become theirs again bit by bit."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dufu.cli.main import run
from tests.interchange import strangers as s
from tests.interchange.strangers import HIDDEN, INNER, LAYERS, LENGTH, VOCAB, State

CLOSE = 1e-5  # float32, sums of a few dozen numbers in another order
HEADS = f"num_attention_heads={s.HEADS}"


def convert(*arguments: Any) -> None:
    assert run(["convert", *map(str, arguments)]) == 0


def scores(folder: Path, ids: Tensor) -> Tensor:
    """Return what transformers computes from a folder."""
    import transformers

    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    with torch.no_grad():
        out = model(ids)
    found: Tensor = out.prediction_logits if "PreTraining" in kind else out.logits
    return found


def far(one: Tensor, two: Tensor) -> float:
    return float((one - two).abs().max())


def same(one: State, two: State) -> None:
    assert set(one) == set(two)
    assert all(torch.equal(one[name], two[name]) for name in one)


def flat(content: Any, prefix: str = "") -> State:
    found: State = {}
    for name, value in content.items():
        key = f"{prefix}.{name}" if prefix else name
        found |= flat(value, key) if isinstance(value, dict) else {key: value}
    return found


# LiBai


def libai_gpt() -> tuple[State, s.Names]:
    names = replace(s.MEGATRON_LIKE, layer="GPT_model.transformer.layers.{}")
    shapes = {
        "GPT_model.embeddings.token_embeddings.weight": (VOCAB, HIDDEN),
        "GPT_model.embeddings.position_embeddings.weight": (LENGTH, HIDDEN),
        **s.layer_shapes(names), **s.norm_shapes("GPT_model.transformer.layernorm_f"),
    }  # fmt: skip
    return s.filled(shapes), names


def libai_gpt_scores(state: State, names: s.Names, ids: Tensor) -> Tensor:
    words = state["GPT_model.embeddings.token_embeddings.weight"]
    x = words[ids] + state["GPT_model.embeddings.position_embeddings.weight"][: ids.shape[1]]
    for number in range(LAYERS):
        x = s.run_layer(x, state, names, number, s.by_head, True, True, torch.nn.functional.gelu)
    return s.norm(x, state, "GPT_model.transformer.layernorm_f") @ words.t()


def test_libai_gpt(tmp_path: Path) -> None:
    state, names = libai_gpt()
    torch.save(state, tmp_path / "gpt.pt")
    convert(tmp_path / "gpt.pt", tmp_path / "hf", HEADS, "--from", "libai")
    expected = libai_gpt_scores(state, names, s.some_ids())
    assert far(scores(tmp_path / "hf", s.some_ids()), expected) < CLOSE
    convert(tmp_path / "hf", tmp_path / "back.pt", "--from", "hf", "--to", "libai")
    same(torch.load(tmp_path / "back.pt"), state)
    # As many heads of another size are other numbers: the order of the rows was looked at.
    convert(tmp_path / "gpt.pt", tmp_path / "wrong", "num_attention_heads=2", "--from", "libai")
    assert far(scores(tmp_path / "wrong", s.some_ids()), expected) > 0.01


def libai_encoder(root: str, head: str) -> tuple[State, s.Names]:
    names = replace(s.MEGATRON_LIKE, layer=f"{root}.encoders.{{}}")
    embedding = f"{root}.embeddings"
    shapes = {
        f"{embedding}.vocab_embeddings.weight": (VOCAB, HIDDEN), f"{embedding}.position_embeddings.weight": (LENGTH, HIDDEN),
        f"{embedding}.tokentype_embeddings.weight": (2, HIDDEN), **s.layer_shapes(names), **s.norm_shapes(f"{root}.final_layernorm"),
    }  # fmt: skip
    if head == "cls_head":
        shapes |= s.linear_shapes(f"{root}.pooler.dense", HIDDEN, HIDDEN) | s.linear_shapes("cls_head.seq_relationship", 2, HIDDEN)
    inner = f"{head}.predictions" if head == "cls_head" else head
    shapes |= s.linear_shapes(f"{inner}.dense", HIDDEN, HIDDEN) | s.norm_shapes(f"{inner}.layernorm")
    return s.filled({**shapes, f"{head}.lm_logits.bias": (VOCAB,)}), names


def libai_encoder_scores(state: State, names: s.Names, ids: Tensor, root: str, head: str, post: bool) -> Tensor:
    words = state[f"{root}.embeddings.vocab_embeddings.weight"]
    x = words[ids] + state[f"{root}.embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = x + state[f"{root}.embeddings.tokentype_embeddings.weight"][0]
    gelu = torch.nn.functional.gelu
    for number in range(LAYERS):
        if not post:
            x = s.run_layer(x, state, names, number, s.by_head, False, True, gelu)
            continue
        # LiBai adds each branch to what the norm before it gave.
        at = names.layer.format(number)
        x = s.norm(x, state, f"{at}.input_layernorm")
        q, k, v = s.by_head(s.affine(x, state, f"{at}.self_attention.query_key_value"))
        x = x + s.affine(s.attend(q, k, v, False), state, f"{at}.self_attention.dense")
        x = s.norm(x, state, f"{at}.post_attention_layernorm")
        x = x + s.affine(gelu(s.affine(x, state, f"{at}.mlp.dense_h_to_4h")), state, f"{at}.mlp.dense_4h_to_h")
    x = s.norm(x, state, f"{root}.final_layernorm")
    inner = f"{head}.predictions" if head == "cls_head" else head
    x = s.norm(gelu(s.affine(x, state, f"{inner}.dense")), state, f"{inner}.layernorm")
    return x @ words.t() + state[f"{head}.lm_logits.bias"]


@pytest.mark.parametrize(
    ("root", "head", "post"), [("bert", "cls_head", True), ("bert", "cls_head", False), ("roberta", "lm_head", True)]
)
def test_libai_encoders(tmp_path: Path, root: str, head: str, post: bool) -> None:
    state, names = libai_encoder(root, head)
    torch.save(state, tmp_path / "model.pt")
    order = f"apply_residual_post_layernorm={str(post).lower()}"
    convert(tmp_path / "model.pt", tmp_path / "hf", HEADS, order, "layernorm_epsilon=1e-5", "--from", "libai")
    ids = s.some_ids(3)  # transformers takes 1 for padding in RoBERTa
    assert far(scores(tmp_path / "hf", ids), libai_encoder_scores(state, names, ids, root, head, post)) < CLOSE
    convert(tmp_path / "hf", tmp_path / "back.pt", "--from", "hf", "--to", "libai")
    same(torch.load(tmp_path / "back.pt"), state)


def test_libai_bert_without_a_head(tmp_path: Path) -> None:
    state, _ = libai_encoder("bert", "cls_head")
    bare = {name.removeprefix("bert."): value for name, value in state.items() if name.startswith("bert.")}
    torch.save(state, tmp_path / "whole.pt")
    torch.save(bare, tmp_path / "bare.pt")
    options = (HEADS, "apply_residual_post_layernorm=true", "--from", "libai", "--model", "bert")
    convert(tmp_path / "whole.pt", tmp_path / "whole", *options)
    convert(tmp_path / "bare.pt", tmp_path / "bare", *options)
    from transformers import BertModel

    with torch.no_grad():
        one, two = (BertModel.from_pretrained(tmp_path / name).eval()(s.some_ids()) for name in ("whole", "bare"))
    assert torch.equal(one.last_hidden_state, two.last_hidden_state)
    assert torch.equal(one.pooler_output, two.pooler_output)


@pytest.mark.parametrize("numbered", [False, True])
def test_libai_in_oneflow_folders(tmp_path: Path, numbered: bool, capsys: pytest.CaptureFixture[str]) -> None:
    state, names = libai_gpt()
    folder = tmp_path / "model_final" / "model"
    write_oneflow(folder, state, numbered)
    convert(tmp_path / "model_final", tmp_path / "hf", HEADS, "--from", "libai")
    assert far(scores(tmp_path / "hf", s.some_ids()), libai_gpt_scores(state, names, s.some_ids())) < CLOSE
    out = next(folder.glob("*/out"))
    out.write_bytes(out.read_bytes()[:-4])
    assert run(["convert", str(folder), str(tmp_path / "again"), HEADS, "--from", "libai"]) == 2
    assert "cut short or damaged" in capsys.readouterr().err


def write_oneflow(folder: Path, state: State, numbered: bool) -> None:
    """Write what flow.save does: a folder a tensor, by its name or numbered, and then a pickle of who is who."""
    import pickle
    import sys
    import types

    places = {name: f"global_tensor_{n}" if numbered else name for n, name in enumerate(state)}
    for name, value in state.items():
        (folder / places[name]).mkdir(parents=True)
        dims = "".join(f"  dim: {size}\n" for size in value.shape)
        (folder / places[name] / "meta").write_text(f"shape {{\n{dims}}}\ndata_type: kFloat\n")
        (folder / places[name] / "out").write_bytes(value.numpy().tobytes())
    if not numbered:
        (folder / "snapshot_done").touch()
        return

    class Tensor:
        def __init__(self, place: str) -> None:
            self.place = place

        def __getstate__(self) -> dict[str, str]:
            return {"path": self.place}

    Tensor.__module__, Tensor.__qualname__ = "oneflow", "Tensor"
    sys.modules["oneflow"] = types.SimpleNamespace(Tensor=Tensor)  # type: ignore[assignment]
    try:
        listed = pickle.dumps({"protocol_version": 1, "data": {name: Tensor(place) for name, place in places.items()}})
    finally:
        del sys.modules["oneflow"]
    (folder / "pickled_data").write_bytes(listed)


# UER-py and TencentPretrain


def uer_bert() -> State:
    shapes = {
        "embedding.word.embedding.weight": (VOCAB, HIDDEN), "embedding.pos.embedding.weight": (LENGTH, HIDDEN),
        "embedding.seg.embedding.weight": (3, HIDDEN), **s.norm_shapes("embedding.layer_norm", ("gamma", "beta")),
        **s.layer_shapes(s.UER, ("gamma", "beta")), **s.linear_shapes("target.mlm.linear_1", HIDDEN, HIDDEN),
        **s.norm_shapes("target.mlm.layer_norm", ("gamma", "beta")), "target.mlm.linear_2.bias": (VOCAB,),
        **s.linear_shapes("target.sp.linear_1", HIDDEN, HIDDEN), **s.linear_shapes("target.sp.linear_2", 2, HIDDEN),
    }  # fmt: skip
    state = s.filled(shapes)
    return {**state, "target.mlm.linear_2.weight": state["embedding.word.embedding.weight"]}


def uer_bert_scores(state: State, ids: Tensor, segment: int, normed: Any) -> Tensor:
    x = state["embedding.word.embedding.weight"][ids] + state["embedding.pos.embedding.weight"][: ids.shape[1]]
    x = normed(x + state["embedding.seg.embedding.weight"][segment], state, "embedding.layer_norm")
    for number in range(LAYERS):
        x = s.run_layer(x, state, s.UER, number, s.by_kind, False, False, torch.nn.functional.gelu, normed)
    x = normed(torch.nn.functional.gelu(s.affine(x, state, "target.mlm.linear_1")), state, "target.mlm.layer_norm")
    return s.affine(x, state, "target.mlm.linear_2")


def plain_norm(x: Tensor, state: Any, name: str) -> Tensor:
    return torch.nn.functional.layer_norm(x, (HIDDEN,), state[f"{name}.gamma"], state[f"{name}.beta"], 1e-12)


UER_CONFIG = {
    "emb_size": HIDDEN, "feedforward_size": INNER, "hidden_size": HIDDEN, "hidden_act": "gelu", "heads_num": s.HEADS, "layers_num": LAYERS,
    "max_seq_length": LENGTH, "dropout": 0.1, "data_processor": "bert", "embedding": ["word", "pos", "seg"], "encoder": "transformer",
    "mask": "fully_visible", "target": ["mlm", "sp"], "tie_weights": True,
}  # fmt: skip
OLD_UER = (
    ("embedding.word.embedding", "embedding.word_embedding"), ("embedding.pos.embedding", "embedding.position_embedding"),
    ("embedding.seg.embedding", "embedding.segment_embedding"), ("target.mlm.linear_", "target.mlm_linear_"),
    ("target.mlm.layer_norm", "target.layer_norm"), ("target.sp.linear_", "target.nsp_linear_"),
)  # fmt: skip


@pytest.mark.parametrize("old", [False, True])
def test_uer_bert(tmp_path: Path, old: bool, capsys: pytest.CaptureFixture[str]) -> None:
    state = uer_bert()
    saved = dict(state)
    for today, then in OLD_UER if old else ():
        saved = {name.replace(today, then): value for name, value in saved.items()}
    torch.save(saved, tmp_path / "bert.bin")
    (tmp_path / "config.json").write_text(json.dumps(UER_CONFIG))
    options = ("--from", "uer", "--config", tmp_path / "config.json")
    convert(tmp_path / "bert.bin", tmp_path / "hf", *options)
    told = capsys.readouterr().out
    assert "--exact-norms" in told
    assert "embedding.seg.embedding.weight@0" in told
    assert far(scores(tmp_path / "hf", s.some_ids()), uer_bert_scores(state, s.some_ids(), 1, plain_norm)) < CLOSE
    convert(tmp_path / "hf", tmp_path / "back.bin", "--from", "hf", "--to", "tencentpretrain")
    same(torch.load(tmp_path / "back.bin"), state)
    assert json.loads((tmp_path / "back.bin.json").read_text())["heads_num"] == s.HEADS


def test_uer_norms_can_be_made_exact(tmp_path: Path) -> None:
    state = uer_bert()
    torch.save(state, tmp_path / "bert.bin")
    expected = uer_bert_scores(state, s.some_ids(), 1, s.uer_norm)
    for name, exact in (("copied", ()), ("exact", ("--exact-norms",))):
        convert(tmp_path / "bert.bin", tmp_path / name, HEADS, "--from", "uer", "--model", "bert", *exact)
    assert far(scores(tmp_path / "exact", s.some_ids()), expected) < CLOSE
    assert far(scores(tmp_path / "copied", s.some_ids()), expected) > 0.01


@pytest.mark.parametrize("tied", [False, True])
def test_uer_gpt2(tmp_path: Path, tied: bool) -> None:
    shapes = {
        "embedding.word.embedding.weight": (VOCAB, HIDDEN), "embedding.pos.embedding.weight": (LENGTH, HIDDEN),
        **s.layer_shapes(s.UER, ("gamma", "beta")), **s.norm_shapes("encoder.layer_norm", ("gamma", "beta")),
        "target.lm.output_layer.weight": (VOCAB, HIDDEN),
    }  # fmt: skip
    state = s.filled(shapes)
    if tied:
        state["target.lm.output_layer.weight"] = state["embedding.word.embedding.weight"]
    torch.save({**state, "target.lm.output_layer.bias": torch.zeros(VOCAB)}, tmp_path / "gpt2.bin")
    convert(tmp_path / "gpt2.bin", tmp_path / "hf", HEADS, "layernorm_epsilon=1e-12", "--from", "tencentpretrain")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is tied
    ids = s.some_ids()
    x = state["embedding.word.embedding.weight"][ids] + state["embedding.pos.embedding.weight"][: ids.shape[1]]
    for number in range(LAYERS):
        x = s.run_layer(x, state, s.UER, number, s.by_kind, True, True, s.gelu_tanh, plain_norm)
    expected = plain_norm(x, state, "encoder.layer_norm") @ state["target.lm.output_layer.weight"].t()
    assert far(scores(tmp_path / "hf", ids), expected) < CLOSE
    convert(tmp_path / "hf", tmp_path / "back.bin", "--from", "hf", "--to", "uer")
    same(torch.load(tmp_path / "back.bin"), state)


def test_uer_roberta(tmp_path: Path) -> None:
    state = {name: value for name, value in uer_bert().items() if not name.startswith("target.sp.")}
    state["embedding.pos.embedding.weight"][-2:] = 0  # as their script writes the table
    torch.save(state, tmp_path / "roberta.bin")
    convert(tmp_path / "roberta.bin", tmp_path / "hf", HEADS, "layernorm_epsilon=1e-12", "--from", "uer", "--model", "roberta")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["max_position_embeddings"] == LENGTH
    ids = s.some_ids(3)
    assert far(scores(tmp_path / "hf", ids), uer_bert_scores(state, ids, 1, plain_norm)) < CLOSE
    convert(tmp_path / "hf", tmp_path / "back.bin", "--from", "hf", "--to", "uer")
    same(torch.load(tmp_path / "back.bin"), state)


# Megatron-LM

PADDED = 128


def megatron(bert: bool, top: str = "encoder") -> tuple[State, s.Names]:
    names = replace(s.MEGATRON_LIKE, layer=f"language_model.{top}.layers.{{}}")
    shapes = {
        "language_model.embedding.word_embeddings.weight": (PADDED, HIDDEN),
        "language_model.embedding.position_embeddings.weight": (LENGTH, HIDDEN),
        **s.layer_shapes(names), **s.norm_shapes(f"language_model.{top}.final_layernorm"),
    }  # fmt: skip
    if bert:
        shapes |= {
            "language_model.embedding.tokentype_embeddings.weight": (2, HIDDEN), "lm_head.bias": (PADDED,),
            **s.linear_shapes("language_model.pooler.dense", HIDDEN, HIDDEN), **s.linear_shapes("lm_head.dense", HIDDEN, HIDDEN),
            **s.norm_shapes("lm_head.layernorm"), **s.linear_shapes("binary_head", 2, HIDDEN),
        }  # fmt: skip
    return s.filled(shapes), names


def megatron_scores(state: State, names: s.Names, ids: Tensor, qkv: s.Qkv, bert: bool) -> Tensor:
    words = state["language_model.embedding.word_embeddings.weight"][:VOCAB]
    x = words[ids] + state["language_model.embedding.position_embeddings.weight"][: ids.shape[1]]
    act = torch.nn.functional.gelu if bert else s.gelu_tanh
    if bert:
        x = x + state["language_model.embedding.tokentype_embeddings.weight"][0]
    for number in range(LAYERS):
        x = s.run_layer(x, state, names, number, qkv, not bert, True, act)
    x = s.norm(x, state, f"{names.layer.rpartition('.layers')[0]}.final_layernorm")
    if bert:
        x = s.norm(act(s.affine(x, state, "lm_head.dense")), state, "lm_head.layernorm")
    return x @ words.t() + (state["lm_head.bias"][:VOCAB] if bert else 0)


def nested(state: State, top: str) -> dict[str, Any]:
    """Return the dicts in dicts of a checkpoint."""
    inner: dict[str, Any] = {}
    for name, value in state.items():
        holder = next(
            (h for h in (f"language_model.{top}", "language_model.pooler", "lm_head", "binary_head") if name.startswith(f"{h}.")),
            "",
        )
        path = [*holder.split("."), name.removeprefix(f"{holder}.")] if holder else name.split(".")
        place = inner
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = value
    return inner


def megatron_args(gelu: bool, shards: int = 1) -> argparse.Namespace:
    return argparse.Namespace(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=s.HEADS, max_position_embeddings=LENGTH, padded_vocab_size=PADDED,
        ffn_hidden_size=INNER, openai_gelu=False, bias_gelu_fusion=not gelu, layernorm_epsilon=1e-5, hidden_dropout=0.1,
        attention_dropout=0.1, init_method_std=0.02, tensor_model_parallel_size=shards,
    )  # fmt: skip


ORDERS = {0: s.by_kind, 1.0: s.by_feature, 3.0: s.by_head}


@pytest.mark.parametrize("version", ORDERS)
def test_megatron_gpt_of_each_version(tmp_path: Path, version: float) -> None:
    top = "encoder" if version == 3.0 else "transformer"
    state, names = megatron(False, top)
    content = {"args": megatron_args(False), "checkpoint_version": version, "model": nested(state, top)}
    torch.save(content, tmp_path / "model_optim_rng.pt")
    convert(tmp_path / "model_optim_rng.pt", tmp_path / "hf", f"vocab_size={VOCAB}", "--from", "megatron")
    expected = megatron_scores(state, names, s.some_ids(), ORDERS[version], False)
    assert far(scores(tmp_path / "hf", s.some_ids()), expected) < CLOSE
    # A version that is not the file's gives other numbers.
    wrong = 3 if version != 3 else 0
    convert(
        tmp_path / "model_optim_rng.pt",
        tmp_path / "wrong",
        f"vocab_size={VOCAB}",
        f"checkpoint_version={wrong}",
        "--from",
        "megatron",
    )
    assert far(scores(tmp_path / "wrong", s.some_ids()), expected) > 0.01


@pytest.mark.parametrize("bert", [False, True])
def test_megatron_goes_back(tmp_path: Path, bert: bool) -> None:
    state, names = megatron(bert)
    content = {"args": megatron_args(bert), "checkpoint_version": 3.0, "model": nested(state, "encoder")}
    torch.save(content, tmp_path / "model_optim_rng.pt")
    convert(tmp_path / "model_optim_rng.pt", tmp_path / "hf", f"vocab_size={VOCAB}", "--from", "megatron")
    assert far(scores(tmp_path / "hf", s.some_ids()), megatron_scores(state, names, s.some_ids(), s.by_head, bert)) < CLOSE
    convert(tmp_path / "hf", tmp_path / "back", "--from", "hf", "--to", "megatron")
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text().strip() == "release"
    with torch.serialization.safe_globals([argparse.Namespace]):
        back = torch.load(tmp_path / "back" / "release" / "mp_rank_00" / "model_optim_rng.pt")
    same(flat(back["model"]), state)
    assert back["args"].padded_vocab_size == PADDED
    convert(tmp_path / "back", tmp_path / "again", f"vocab_size={VOCAB}", "--from", "megatron")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "hf" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("version", [0, 3.0])
def test_megatron_shards_are_put_together(tmp_path: Path, version: float) -> None:
    state, names = megatron(False)
    for rank in range(2):
        shard = {name: megatron_shard(name, value, rank, version) for name, value in state.items()}
        folder = tmp_path / "run" / "iter_0000010" / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        content = {"args": megatron_args(False, 2), "checkpoint_version": version, "model": nested(shard, "encoder")}
        torch.save(content, folder / "model_optim_rng.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    convert(tmp_path / "run", tmp_path / "hf", f"vocab_size={VOCAB}", "--from", "megatron")
    expected = megatron_scores(state, names, s.some_ids(), ORDERS[version], False)
    assert far(scores(tmp_path / "hf", s.some_ids()), expected) < CLOSE


def megatron_shard(name: str, value: Tensor, rank: int, version: float) -> Tensor:
    if "query_key_value" in name and version == 0:  # each process has its heads' queries, keys and values
        return value.view(3, 2, HIDDEN // 2, *value.shape[1:])[:, rank].reshape(3 * HIDDEN // 2, *value.shape[1:]).clone()
    if any(part in name for part in ("word_embeddings", "query_key_value", "dense_h_to_4h")):
        return value.chunk(2)[rank].clone()
    if name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight")):
        return value.chunk(2, 1)[rank].clone()
    return value


def test_megatron_core_names(tmp_path: Path) -> None:
    state, names = megatron(False)
    renamed = {}
    for name, value in state.items():
        today = name.removeprefix("language_model.").replace("encoder.", "decoder.")
        for old, new in (
            ("self_attention.query_key_value.", "self_attention.linear_qkv."), ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
            ("self_attention.dense.", "self_attention.linear_proj."), ("mlp.dense_h_to_4h.", "mlp.linear_fc1."),
            ("post_attention_layernorm.", "mlp.linear_fc1.layer_norm_"), ("mlp.dense_4h_to_h.", "mlp.linear_fc2."),
        ):  # fmt: skip
            today = today.replace(old, new)
        renamed[today] = value
    torch.save({"args": megatron_args(False), "checkpoint_version": 3.0, "model": renamed}, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "hf", f"vocab_size={VOCAB}", "--from", "megatron")
    assert far(scores(tmp_path / "hf", s.some_ids()), megatron_scores(state, names, s.some_ids(), s.by_head, False)) < CLOSE


# fairseq


def fairseq_roberta(root: str = "encoder") -> tuple[State, s.Names]:
    names = replace(s.FAIRSEQ, layer=f"{root}.sentence_encoder.layers.{{}}")
    shapes = {
        f"{root}.sentence_encoder.embed_tokens.weight": (VOCAB, HIDDEN),
        f"{root}.sentence_encoder.embed_positions.weight": (LENGTH + 2, HIDDEN),
        **s.norm_shapes(f"{root}.sentence_encoder.emb_layer_norm"), **s.layer_shapes(names),
        **s.linear_shapes(f"{root}.lm_head.dense", HIDDEN, HIDDEN), **s.norm_shapes(f"{root}.lm_head.layer_norm"),
        f"{root}.lm_head.bias": (VOCAB,),
    }  # fmt: skip
    state = s.filled(shapes)
    return {**state, f"{root}.lm_head.weight": state[f"{root}.sentence_encoder.embed_tokens.weight"]}, names


def fairseq_roberta_scores(state: State, names: s.Names, ids: Tensor, root: str = "encoder") -> Tensor:
    at = f"{root}.sentence_encoder"
    x = state[f"{at}.embed_tokens.weight"][ids] + state[f"{at}.embed_positions.weight"][2 : 2 + ids.shape[1]]
    x = s.norm(x, state, f"{at}.emb_layer_norm")
    for number in range(LAYERS):
        x = s.run_layer(x, state, names, number, s.by_kind, False, False, torch.nn.functional.gelu)
    x = s.norm(torch.nn.functional.gelu(s.affine(x, state, f"{root}.lm_head.dense")), state, f"{root}.lm_head.layer_norm")
    return x @ state[f"{root}.lm_head.weight"].t() + state[f"{root}.lm_head.bias"]


def test_fairseq_roberta(tmp_path: Path) -> None:
    state, names = fairseq_roberta()
    args = argparse.Namespace(
        arch="roberta_base", encoder_attention_heads=s.HEADS, activation_fn="gelu", dropout=0.1, attention_dropout=0.1
    )
    torch.save({"args": args, "model": state}, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "hf", "--from", "fairseq")
    ids = s.some_ids(3)
    assert far(scores(tmp_path / "hf", ids), fairseq_roberta_scores(state, names, ids)) < CLOSE
    convert(tmp_path / "hf", tmp_path / "back.pt", "--from", "hf", "--to", "fairseq")
    with torch.serialization.safe_globals([argparse.Namespace]):
        back = torch.load(tmp_path / "back.pt")
    same(back["model"], state)
    assert back["args"].encoder_attention_heads == s.HEADS


def test_fairseq_roberta_with_a_classification_head(tmp_path: Path) -> None:
    state, names = fairseq_roberta()
    for name, labels in (("mnli", 3), ("other", 2)):
        at = f"classification_heads.{name}"
        state |= s.filled(
            s.linear_shapes(f"{at}.dense", HIDDEN, HIDDEN) | s.linear_shapes(f"{at}.out_proj", labels, HIDDEN), labels
        )
    torch.save({"model": state}, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "hf", HEADS, "head=mnli", "--from", "fairseq")
    ids, at = s.some_ids(3), "encoder.sentence_encoder"
    x = state[f"{at}.embed_tokens.weight"][ids] + state[f"{at}.embed_positions.weight"][2 : 2 + ids.shape[1]]
    x = s.norm(x, state, f"{at}.emb_layer_norm")
    for number in range(LAYERS):
        x = s.run_layer(x, state, names, number, s.by_kind, False, False, torch.nn.functional.gelu)
    pooled = torch.tanh(s.affine(x[:, 0], state, "classification_heads.mnli.dense"))
    assert far(scores(tmp_path / "hf", ids), s.affine(pooled, state, "classification_heads.mnli.out_proj")) < CLOSE
    convert(tmp_path / "hf", tmp_path / "back.pt", "--from", "hf", "--to", "fairseq")
    with torch.serialization.safe_globals([argparse.Namespace]):
        back = torch.load(tmp_path / "back.pt")["model"]
    assert torch.equal(
        back["classification_heads.sentence_classification_head.out_proj.bias"], state["classification_heads.mnli.out_proj.bias"]
    )


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_the_type_stays(tmp_path: Path, kind: torch.dtype) -> None:
    state = {name: value.to(kind) for name, value in libai_gpt()[0].items()}
    torch.save(state, tmp_path / "gpt.pt")
    convert(tmp_path / "gpt.pt", tmp_path / "hf", HEADS, "--from", "libai")
    convert(tmp_path / "hf", tmp_path / "back.pt", "--from", "hf", "--to", "libai")
    same(torch.load(tmp_path / "back.pt"), state)


def test_fairseq_roberta_with_joint_projections_and_old_names(tmp_path: Path) -> None:
    state, names = fairseq_roberta("decoder")
    old = {name: value for name, value in state.items() if "_proj." not in name or "out_proj" in name}
    for number in range(LAYERS):
        at = f"{names.layer.format(number)}.self_attn"
        for leaf in ("weight", "bias"):
            old[f"{at}.in_proj_{leaf}"] = torch.cat([state[f"{at}.{kind}_proj.{leaf}"] for kind in "qkv"])
    torch.save({"model": old}, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "hf", HEADS, "--from", "fairseq")
    ids = s.some_ids(3)
    assert far(scores(tmp_path / "hf", ids), fairseq_roberta_scores(state, names, ids, "decoder")) < CLOSE


@pytest.mark.parametrize(
    ("learned", "scaled", "shared"), [(True, False, True), (True, False, False), (False, True, True), (False, True, False)]
)
def test_fairseq_language_model(tmp_path: Path, learned: bool, scaled: bool, shared: bool) -> None:
    names = replace(s.FAIRSEQ, layer="decoder.layers.{}")
    shapes = {
        "decoder.embed_tokens.weight": (VOCAB, HIDDEN), **s.layer_shapes(names), **s.norm_shapes("decoder.layer_norm"),
        **({"decoder.embed_positions.weight": (LENGTH + 2, HIDDEN)} if learned else {"decoder.embed_positions._float_tensor": (1,)}),
        "decoder.output_projection.weight": (VOCAB, HIDDEN),
    }  # fmt: skip
    state = s.filled(shapes)
    if shared:
        state["decoder.output_projection.weight"] = state["decoder.embed_tokens.weight"]
    args = {
        "_name": "transformer_lm", "decoder_attention_heads": s.HEADS, "activation_fn": "relu", "dropout": 0.1, "attention_dropout": 0.0,
        "no_scale_embedding": not scaled, "decoder_learned_pos": learned, "share_decoder_input_output_embed": shared,
        "max_target_positions": LENGTH,
    }  # fmt: skip
    torch.save({"args": None, "cfg": {"model": args}, "model": state}, tmp_path / "lm.pt")
    convert(tmp_path / "lm.pt", tmp_path / "hf", "--from", "fairseq")
    ids = s.some_ids()
    table = state["decoder.embed_positions.weight"] if learned else fairseq_sines(LENGTH + 2)
    x = state["decoder.embed_tokens.weight"][ids] * (math.sqrt(HIDDEN) if scaled else 1) + table[2 : 2 + ids.shape[1]]
    for number in range(LAYERS):
        x = s.run_layer(x, state, names, number, s.by_kind, True, True, torch.relu)
    expected = s.norm(x, state, "decoder.layer_norm") @ state["decoder.output_projection.weight"].t()
    assert far(scores(tmp_path / "hf", ids), expected) < CLOSE
    if learned and not scaled:
        convert(tmp_path / "hf", tmp_path / "back.pt", "--from", "hf", "--to", "fairseq")
        with torch.serialization.safe_globals([argparse.Namespace]):
            same(torch.load(tmp_path / "back.pt")["model"], state)


def fairseq_sines(length: int) -> Tensor:
    """Position p: sin(p / 10000^(i / (half - 1))) for all i, then the cosines."""
    table = torch.zeros(length, HIDDEN)
    half = HIDDEN // 2
    for position in range(length):
        for i in range(half):
            angle = position / 10000 ** (i / (half - 1))
            table[position, i], table[position, half + i] = math.sin(angle), math.cos(angle)
    return table
