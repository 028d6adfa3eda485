"""An exported folder: whole or absent, movable, and text from it alone."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.cli.main import run as dufu
from dufu.data.tokenizer import byte_tokenizer
from dufu.errors import CheckpointError, ConfigError, DufuError
from dufu.generation import TextGenerationPipeline
from dufu.onnx import export_onnx
from dufu.onnx.session import Session
from dufu.training.run import train
from tests.small import TINY

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

PROMPTS = ["The ", "A class definition", "x", "Names refer to", "The "]
SETTINGS: list[dict[str, Any]] = [
    {"max_new_tokens": 6},
    {"max_new_tokens": 6, "use_cache": False},
    {"max_new_tokens": 6, "temperature": 1.0, "top_k": 60, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 3},
]
# Wide initial weights, so that different prompts get different texts.
MODEL = [*TINY, "model.cfg.hidden_layers=1", "model.cfg.initializer_range=0.4", "optim.lr=0.0001", "train.train_iter=1"]


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx") / "run"
    train("gpt2_tiny", [*MODEL, f"train.output_dir={folder}"], data=[str(corpus)])
    return folder


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("onnx") / "deep" / "out"
    found = export_onnx(trained, out, external_above=50_000)
    assert [path.name for path in found.files] == ["model.onnx", "model.onnx_data"]
    assert not list(out.parent.glob(".*"))
    return out


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "copy")
    return tmp_path / "copy"


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert dufu(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def test_the_same_text_by_onnxruntime_alone_after_moving(trained: Path, exported: Path, tmp_path: Path) -> None:
    """B151: the weights lie beside the graph, found by a relative path; nothing of the run is needed."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(exported, tmp_path / "other" / "place")
    shutil.move(tmp_path / "other" / "place", moved)
    for file in ("model.onnx", "model.onnx_data"):
        assert (moved / file).stat().st_size > 10_000
    expected = TextGenerationPipeline(trained)
    alone = TextGenerationPipeline(moved)
    assert not list(alone.model.parameters())
    for settings in SETTINGS:
        right = expected(PROMPTS, **settings)
        assert alone(PROMPTS, **settings) == right
        assert len({tuple(each.tokens) for each in right}) >= 4


def test_command_line(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder may be there
    assert dufu(["export", "onnx", str(trained), str(out)]) == 0
    said = capsys.readouterr().out
    assert "model.onnx" in said and "onnxruntime equals PyTorch in" in said
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "dufu_onnx.json",
        "model.onnx",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    texts = []
    for folder in (trained, out):
        assert (
            dufu(["generate", str(folder), "--prompt", "The ", "--max-new-tokens", "5", "--temperature", "1", "--seed", "4"]) == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    content = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "exists already" in error_of(["export", "onnx", str(trained), str(out)], capsys)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == content


def test_an_encoder_decoder_model_of_a_hugging_face_folder(tmp_path: Path) -> None:
    """Three graphs: the encoder runs once, the decoder's first step fills the caches, its later steps use them."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=264, d_model=32, d_ff=64, d_kv=8, num_layers=1, num_heads=4, decoder_start_token_id=257, eos_token_id=256, pad_token_id=257
    )  # fmt: skip
    theirs = transformers.T5ForConditionalGeneration(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path / "hf")
    byte_tokenizer().save(tmp_path / "hf")
    found = export_onnx(tmp_path / "hf", tmp_path / "out")
    names = ["encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"]
    assert [path.name for path in found.files] == names
    kept = [f"0.{side}.{kind}" for side in ("decoder", "encoder") for kind in ("key", "value")]
    first, later = (Session(tmp_path / "out" / name) for name in names[1:])
    assert first.outputs == ["logits", *(f"present.{name}" for name in kept)]
    assert later.inputs[2:] == [f"past_key_values.{name}" for name in kept]
    assert later.outputs == ["logits", *(f"present.{name}" for name in kept[:2])]
    expected, alone = TextGenerationPipeline(tmp_path / "hf"), TextGenerationPipeline(tmp_path / "out")
    assert not list(alone.model.parameters())
    for settings in SETTINGS:
        right = expected(PROMPTS, **settings)
        assert alone(PROMPTS, **settings) == right
        assert len({tuple(each.tokens) for each in right}) >= 4


@pytest.mark.skipif(os.environ.get("DUFU_MODELS") != "all", reason="DUFU_MODELS=all")
def test_a_model_of_pictures_needs_no_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, image_size=8, patch_size=4, num_labels=5,
        initializer_range=0.3,
    )  # fmt: skip
    theirs = transformers.ViTForImageClassification(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    export_onnx(tmp_path / "hf", tmp_path / "out")
    pixels = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            Session(tmp_path / "out" / "model.onnx")([pixels])[0], theirs(pixels).logits, atol=1e-5, rtol=1e-5
        )
    with pytest.raises(ConfigError, match="kind picture"):
        TextGenerationPipeline(tmp_path / "out")


def test_what_an_exported_folder_cannot_do(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate = ["generate", str(exported), "--prompt", "x"]
    assert "has no such settings" in error_of([*generate, "train.dist.tensor_parallel_size=2"], capsys)
    assert "one process" in error_of([*generate, "--nproc", "2"], capsys)


@pytest.mark.parametrize("damage", ["cut graph", "no graph", "cut data", "no data", "facts", "other model", "path"])
def test_damage_is_one_line(copy: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads((copy / "dufu_onnx.json").read_text())
    if damage in ("cut graph", "cut data"):
        path = copy / ("model.onnx" if damage == "cut graph" else "model.onnx_data")
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage in ("no graph", "no data"):
        (copy / ("model.onnx" if damage == "no graph" else "model.onnx_data")).unlink()
    elif damage == "facts":
        (copy / "dufu_onnx.json").write_text('{"kind": 3}')
    elif damage == "other model":
        (copy / "dufu_onnx.json").write_text(json.dumps({**facts, "caches": [[4, 8], [4, 8]]}))
    else:
        (copy / "dufu_onnx.json").write_text(json.dumps({**facts, "graphs": ["../model.onnx"]}))
    with pytest.raises(CheckpointError, match=r"damaged|missing|different models"):
        TextGenerationPipeline(copy)
    assert "Traceback" not in error_of(["generate", str(copy), "--prompt", "x"], capsys)


def test_a_graph_that_differs_leaves_nothing(
    trained: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(graph: Any, folder: Path, *_: Any) -> list[Path]:  # the graph that was made before; making it again takes seconds
        return [Path(shutil.copy(exported / name, folder)) for name in ("model.onnx", "model.onnx_data")]

    monkeypatch.setattr("dufu.onnx.export.write_graph", write)
    export_onnx(trained, tmp_path / "right")
    assert (tmp_path / "right" / "model.onnx").is_file()
    monkeypatch.setattr("dufu.onnx.compare.TOLERANCE", 0.0)
    with pytest.raises(DufuError, match="differs from PyTorch"):
        export_onnx(trained, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["right"]


def test_without_the_extra(exported: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("onnxruntime", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'dufu\[onnx\]'"):
        export_onnx(trained, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"pip install 'dufu\[onnx\]'"):
        TextGenerationPipeline(exported)
    assert not list(tmp_path.iterdir())
