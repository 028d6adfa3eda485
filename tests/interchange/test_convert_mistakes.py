"""What is wrong with a checkpoint, or with what is said of it, is one line and exit status 2; and nothing in a file is run."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dufu.cli.main import run
from dufu.interchange.formats.reading import StandIn, open_pickled
from dufu.training import convert as converting
from tests.interchange import strangers as s
from tests.interchange.strangers import HIDDEN, LENGTH, VOCAB
from tests.interchange.test_convert import (
    HEADS,
    UER_CONFIG,
    convert,
    fairseq_roberta,
    libai_gpt,
    megatron,
    megatron_args,
    nested,
    uer_bert,
)

Said = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """Run a conversion that must fail, and return what it says."""

    def saying(source: Any, *arguments: Any) -> str:
        path = source
        if not isinstance(source, Path):
            path = tmp_path / "model.pt"
            torch.save(source, path)
        capsys.readouterr()
        assert run(["convert", str(path), str(tmp_path / "out"), *map(str, arguments)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".out*"))
        return said

    return saying


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_bomb_is_refused_and_not_run(tmp_path: Path, refused: Said) -> None:
    said = refused({**libai_gpt()[0], "extra": Bomb(tmp_path / "ran")}, "--from", "libai", HEADS)
    assert "reading it would run code" in said
    assert not (tmp_path / "ran").exists()


def test_a_bomb_in_a_oneflow_folder_is_refused_and_not_run(tmp_path: Path, refused: Said) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "pickled_data").write_bytes(pickle.dumps({"protocol_version": 1, "data": {"weight": Bomb(tmp_path / "ran")}}))
    assert "reading it would run code" in refused(folder, "--from", "libai")
    assert not (tmp_path / "ran").exists()


def test_what_training_keeps_beside_the_weights_becomes_stand_ins(tmp_path: Path) -> None:
    state, _ = megatron(False)
    rng = {"np_rng_state": np.random.get_state(), "random_rng_state": random.getstate(), "torch_rng_state": torch.get_rng_state()}
    content = {"args": megatron_args(False), "checkpoint_version": 3.0, "model": nested(state, "encoder"), "rng_state": [rng]}
    torch.save(content, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "hf", "--from", "megatron")
    held = open_pickled(tmp_path / "model.pt").content["rng_state"][0]["np_rng_state"]
    assert isinstance(held[1], StandIn)


def test_a_file_that_is_cut_short(tmp_path: Path, refused: Said) -> None:
    path = tmp_path / "whole.pt"
    torch.save(libai_gpt()[0], path)
    path.write_bytes(path.read_bytes()[:-400])
    assert "not a whole PyTorch file" in refused(path, "--from", "libai", HEADS)


def test_another_format_is_named(refused: Said, tmp_path: Path) -> None:
    assert "its names are not uer's; they look like those of --from libai" in refused(libai_gpt()[0], "--from", "uer")
    assert "they look like those of --from uer" in refused(uer_bert(), "--from", "megatron")
    assert "they look like Hugging Face's" in refused({"transformer.wte.weight": torch.zeros(2, 2)}, "--from", "fairseq")
    assert "dufu export hf makes one" in refused(uer_bert(), "--from", "hf", "--to", "uer")
    assert 'did you mean "libai"?' in refused(uer_bert(), "--from", "libay")
    assert "--from is missing" in refused(uer_bert())
    assert "dufu export hf writes" in refused(uer_bert(), "--from", "hf")


def test_all_wrong_names_are_listed_at_once(refused: Said) -> None:
    state, _ = libai_gpt()
    del state["GPT_model.transformer.layers.1.mlp.dense_4h_to_h.bias"]
    state["GPT_model.transformer.layers.1.adapter.weight"] = torch.zeros(2)
    state["GPT_model.transformer.layers.0.self_attention.dense.bias"] = torch.zeros(3)
    said = refused(state, "--from", "libai", HEADS)
    assert "missing GPT_model.transformer.layers.1.mlp.dense_4h_to_h.bias" in said
    assert "unexpected GPT_model.transformer.layers.1.adapter.weight" in said
    assert f"GPT_model.transformer.layers.0.self_attention.dense.bias is [3] instead of [{HIDDEN}]" in said


def test_a_name_too_many_may_be_allowed(tmp_path: Path) -> None:
    torch.save({**libai_gpt()[0], "adapter.weight": torch.zeros(2)}, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "hf", HEADS, "--from", "libai", "--allow-unexpected", "adapter.*")


def test_a_layer_in_the_middle_is_missing(refused: Said) -> None:
    state = {name.replace(".layers.0.", ".layers.3."): value for name, value in libai_gpt()[0].items()}
    assert "layers are missing: 0, 2" in refused(state, "--from", "libai", HEADS)


def test_values_that_are_no_numbers(refused: Said) -> None:
    state, _ = libai_gpt()
    state["GPT_model.embeddings.position_embeddings.weight"][0, 0] = float("nan")
    assert "no finite numbers" in refused(state, "--from", "libai", HEADS)


def test_tied_weights_that_differ(refused: Said) -> None:
    state = uer_bert()
    state["target.mlm.linear_2.weight"] = state["target.mlm.linear_2.weight"] + 1
    assert "target.mlm.linear_2.weight differs from embedding.word.embedding.weight" in refused(state, "--from", "uer", HEADS)


def test_what_the_weights_do_not_show_must_be_said(refused: Said) -> None:
    assert "give num_attention_heads=NUMBER" in refused(libai_gpt()[0], "--from", "libai")
    mlm = {name: value for name, value in uer_bert().items() if "target.sp" not in name}
    assert "choose with --model bert|roberta" in refused(mlm, "--from", "uer", HEADS)
    encoder = s.filled({"bert.embeddings.vocab_embeddings.weight": (VOCAB, HIDDEN), "bert.encoders.0.mlp.dense_h_to_4h.weight": (4, 4),
                        "bert.embeddings.position_embeddings.weight": (LENGTH, HIDDEN)})  # fmt: skip
    assert "give apply_residual_post_layernorm=true" in refused(encoder, "--from", "libai", HEADS)


def test_a_published_size_says_how_many_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Said) -> None:
    state = {name: torch.zeros(size) for name, size in mini_shapes().items()}
    torch.save(state, tmp_path / "mini.bin")
    convert(tmp_path / "mini.bin", tmp_path / "hf", "--from", "uer")
    assert "assumed num_attention_heads=4, as in bert_mini" in capsys.readouterr().out
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_attention_heads"] == 4
    assert "no published bert has" in refused(state, "--from", "uer", "--model", "bert_base")


def mini_shapes() -> dict[str, tuple[int, ...]]:
    def sized(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        known = {HIDDEN: 256, s.INNER: 1024, 3 * HIDDEN: 768}
        return tuple(known.get(size, size) for size in shape)

    shapes = {name: sized(name, tuple(value.shape)) for name, value in uer_bert().items()}
    layer = {name: shape for name, shape in shapes.items() if ".transformer.0." in name}
    return shapes | {name.replace(".0.", f".{number}.", 1): shape for number in (2, 3) for name, shape in layer.items()}


def test_unknown_settings(refused: Said, tmp_path: Path) -> None:
    assert 'did you mean "hidden_layers"?' in refused(libai_gpt()[0], "--from", "libai", HEADS, "hiden_layers=2")
    assert "a whole number that divides the width, 16" in refused(libai_gpt()[0], "--from", "libai", "num_attention_heads=3")
    assert "a whole number that divides the width, 16" in refused(libai_gpt()[0], "--from", "libai", "num_attention_heads=many")
    assert "name=value is wanted" in refused(libai_gpt()[0], "--from", "libai", "heads")
    config = tmp_path / "config.json"
    for changed, said in (
        ({"rotary_position_embedding": True}, "rotary_position_embedding=True is not built; False is"),
        ({"feed_forward": "gated"}, "feed_forward='gated' is not built; 'dense' is"),
        ({"colour": 1}, "colour=1 is not built, and might change the numbers"),
        ({"hidden_act": "linear"}, "hidden_act='linear' is not built"),
    ):
        config.write_text(json.dumps({**UER_CONFIG, **changed}))
        assert said in refused(uer_bert(), "--from", "uer", "--config", config)
    config.write_text(json.dumps({**UER_CONFIG, "layers_num": 12}))
    assert "the settings say layers_num=12, the weights have 2" in refused(uer_bert(), "--from", "uer", "--config", config)
    config.write_text("{")
    assert "not readable as JSON" in refused(uer_bert(), "--from", "uer", "--config", config)


def test_what_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(libai_gpt()[0], tmp_path / "model.pt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert run(["convert", str(tmp_path / "model.pt"), str(tmp_path / "out"), HEADS, "--from", "libai"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_shards_and_stages(tmp_path: Path, refused: Said) -> None:
    state, _ = megatron(False)
    content = {"args": megatron_args(False, 2), "checkpoint_version": 3.0, "model": nested(state, "encoder")}
    assert "is one of 2 tensor-parallel shards" in refused(content, "--from", "megatron")
    for name, said in (("mp_rank_01", "shards are missing"), ("mp_rank_00_001", "pipeline-parallel run, which is not built")):
        folder = tmp_path / f"of_{name}"
        (folder / name).mkdir(parents=True)
        torch.save(content, folder / name / "model_optim_rng.pt")
        assert said in refused(folder, "--from", "megatron")
    gated = {**content, "args": argparse.Namespace(**{**vars(megatron_args(False)), "swiglu": True})}
    assert "swiglu=True is not built" in refused(gated, "--from", "megatron")


def test_a_model_that_has_no_form_in_a_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, _ = fairseq_roberta()
    torch.save({"model": state}, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "hf", HEADS, "--from", "fairseq")
    for target, said in (("megatron", "has no form in Megatron-LM's format"), ("libai", None), ("uer", None)):
        status = run(["convert", str(tmp_path / "hf"), str(tmp_path / target), "--from", "hf", "--to", target])
        assert status == (2 if said else 0)
        assert (said or "") in capsys.readouterr().err
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights["roberta.embeddings.token_type_embeddings.weight"] += 1
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    assert run(["convert", str(tmp_path / "hf"), str(tmp_path / "lost.pt"), "--from", "hf", "--to", "fairseq"]) == 2
    assert "fairseq has not got a table of segments, and this model's are not zeros" in capsys.readouterr().err


def test_the_table_is_printed_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(uer_bert(), tmp_path / "model.bin")
    convert(tmp_path / "model.bin", tmp_path / "hf", HEADS, "--from", "uer")
    capsys.readouterr()
    convert(tmp_path / "model.bin", HEADS, "--from", "uer", "--show-table")
    inward = capsys.readouterr().out
    convert(tmp_path / "hf", "--from", "hf", "--to", "uer", "--show-table")
    assert capsys.readouterr().out == inward
    assert "embedding.token_type.weight = embedding.seg.embedding.weight[1:3]" in inward
    assert "(target.mlm.linear_2.weight repeats embedding.word.embedding.weight)" in inward


def test_a_vocabulary_goes_along(tmp_path: Path, refused: Said) -> None:
    words = tmp_path / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]) + "\n")
    torch.save(uer_bert(), tmp_path / "model.bin")
    convert(tmp_path / "model.bin", tmp_path / "hf", HEADS, "--from", "uer", "--tokenizer", words)
    assert (tmp_path / "hf" / "vocab.txt").read_bytes() == words.read_bytes()
    words.write_text("a\n" * (VOCAB + 1))
    assert f"has {VOCAB + 1} words, the model {VOCAB}" in refused(
        tmp_path / "model.bin", HEADS, "--from", "uer", "--tokenizer", words
    )


def test_reads_grow_as_the_layers_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers that are read of a file grow by the same amount with each layer."""
    read: list[int] = []
    state, _ = libai_gpt()
    layer = {name: value for name, value in state.items() if ".layers.0." in name}
    original = converting.Tensors.rows

    def counted(tensors: Any, name: str, first: int, count: int, *rest: Any) -> torch.Tensor:
        found = original(tensors, name, first, count, *rest)
        read[-1] += found.numel()
        return found

    monkeypatch.setattr(converting.Tensors, "rows", counted)
    for layers in (2, 4, 8):
        more = {name.replace(".0.", f".{number}.", 1): value for number in range(layers) for name, value in layer.items()}
        torch.save({**state, **more}, tmp_path / f"{layers}.pt")
        read.append(0)
        options = converting.Options(given={"num_attention_heads": s.HEADS})
        converting.convert(tmp_path / f"{layers}.pt", tmp_path / f"out{layers}", "libai", "hf", options)
    assert read[2] - read[1] == 2 * (read[1] - read[0])
