"""A graph computes what PyTorch computes, whatever the batch, the length, the cache and the mask (shared/faults.md, area 15)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dufu.models
from dufu.errors import ConfigError, DufuError, NotBuiltError
from dufu.models import GPT2, Bert, BertClassifier, BertFeatures, Llama, VisionTransformer
from dufu.models.hf import canonical
from dufu.onnx.compare import compare
from dufu.onnx.decoder import DecoderGraph
from dufu.onnx.encoder import EncoderGraph
from dufu.onnx.export import KINDS, kind_of
from dufu.onnx.graph import Graph
from dufu.onnx.picture import PictureGraph
from dufu.onnx.session import Session
from dufu.onnx.write import EXTERNAL_ABOVE, check_settings, write_graph

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ALL = os.environ.get("DUFU_MODELS") == "all"  # also what takes a minute
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_seq_length": 64,
    "use_scaled_init_for_output_weights": False, "initializer_range": 0.2,
}  # fmt: skip
# Float32 sums in another order; numbers are about 1 in size.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def made(model: nn.Module) -> nn.Module:
    """Fill norms and biases too, which begin as ones and zeros and would hide that they are left out."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0 if "norm" in name and "weight" in name else 0.0, 0.2)
    return model.eval()


def written(graph: Graph, folder: Path, external_above: int = EXTERNAL_ABOVE, opset: int = 18) -> Session:
    write_graph(graph, folder, opset, external_above)
    return Session(folder / graph.file)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[DecoderGraph, Session]:
    if request.param == "gpt2":
        model: Any = GPT2(**SMALL)
    else:
        model = Llama(**SMALL, ffn_hidden_size=64, num_key_value_heads=2)
    graph = DecoderGraph(made(model))
    return graph, written(graph, tmp_path_factory.mktemp(request.param))


def step(graph: DecoderGraph, batch: int, past: int, new: int, mask: Tensor | None = None) -> list[Tensor]:
    torch.manual_seed(batch * 1000 + past * 10 + new)
    mask = torch.ones(batch, past + new, dtype=torch.int64) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
    kept = [torch.randn(batch, heads, past, size) for heads, size in graph.shapes for _ in range(2)]
    return [torch.randint(0, 97, (batch, new)), mask, positions, *kept]


@torch.no_grad()
def assert_equal(graph: Graph, session: Session, tensors: list[Tensor]) -> None:
    for name, right, found in zip(graph.outputs(), graph(tensors), session(tensors), strict=True):
        assert right.shape == found.shape, name
        torch.testing.assert_close(found, right, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("past", [1, 7, 33])
@pytest.mark.parametrize("batch", [1, 3])
def test_no_size_of_the_trace_is_baked_in(decoder: tuple[DecoderGraph, Session], batch: int, past: int, new: int) -> None:
    """B148. The trace has a batch of 2, 4 past tokens and 2 new ones."""
    assert_equal(*decoder, step(decoder[0], batch, past, new))


@pytest.mark.parametrize("mask", [[0, 0, 1, 0, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("past", [0, 2, 4])
def test_any_mask(decoder: tuple[DecoderGraph, Session], mask: list[int], past: int) -> None:
    """B152; a token that sees nothing, not even itself, has an attention of zero in both."""
    rows = torch.tensor([mask, mask[::-1]])
    assert_equal(*decoder, step(decoder[0], 2, past, 5 - past, rows))


@torch.no_grad()
def test_one_graph_serves_the_first_step_and_every_later_one(decoder: tuple[DecoderGraph, Session]) -> None:
    """B155: from an empty cache on, each step is fed what the one before gave back."""
    graph, session = decoder
    past_names = [n.removeprefix("past_key_values.") for n in session.inputs if n.startswith("past_key_values.")]
    assert past_names == [n.removeprefix("present.") for n in session.outputs if n.startswith("present.")]
    ids, mask, positions, *kept = step(graph, 2, 0, 4, torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    ours = kept
    for number in range(21):
        right, *ours = graph([ids, mask, positions, *ours])
        found, *kept = session([ids, mask, positions, *kept])
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4, msg=lambda text, number=number: f"step {number}: {text}")
        ids = right[:, -1:].argmax(-1)
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
        positions = positions[:, -1:] + 1
    assert kept[0].shape[2] == 24


def test_names_and_sizes_are_those_that_other_tools_expect(decoder: tuple[DecoderGraph, Session]) -> None:
    import onnx

    graph, session = decoder
    proto = onnx.load(session.path)
    onnx.checker.check_model(proto, full_check=True)
    sizes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input}
    heads, size = graph.shapes[0]
    assert sizes["input_ids"] == ["batch_size", "sequence_length"]
    assert sizes["attention_mask"] == ["batch_size", "past_sequence_length + sequence_length"]
    assert sizes["past_key_values.1.value"] == ["batch_size", heads, "past_sequence_length", size]
    # Weights are kept once, as they are: the tied head of GPT-2 is no second copy.
    parameters = sum(p.numel() for p in graph.parameters()) * 4
    assert parameters < session.path.stat().st_size < parameters + 60_000


@pytest.mark.parametrize("kind", ["pre-training", *(["words", "classes", "features"] if ALL else [])])
def test_bert(kind: str, tmp_path: Path) -> None:
    """B152 for models that see both sides."""
    made_of: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], list[str]]] = {
        "pre-training": (Bert, {}, ["prediction_logits", "seq_relationship_logits"]),
        "words": (Bert, {"sentence_objective": False}, ["logits"]),
        "classes": (BertClassifier, {"num_labels": 3}, ["logits"]),
        "features": (BertFeatures, {}, ["last_hidden_state", "pooler_output"]),
    }
    cls, arguments, names = made_of[kind]
    graph = EncoderGraph(made(cls(**{**SMALL, "hidden_layers": 1}, **arguments)))
    session = written(graph, tmp_path)
    assert session.outputs == names
    assert compare(graph, session).trials > 5
    for mask in ([0, 0, 1, 0, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]):
        rows = torch.tensor([mask, mask[::-1]])
        assert_equal(graph, session, [torch.randint(0, 97, (2, 5)), rows, torch.tensor([[0, 0, 0, 1, 1]] * 2)])


def test_a_graph_that_is_not_the_model_is_not_announced(decoder: tuple[DecoderGraph, Session]) -> None:
    graph, session = decoder
    assert compare(graph, session).difference < 1e-5
    weight = graph.model.layers[1].block.mlp_norm.weight  # type: ignore[union-attr,index]
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[3] += 0.01
        with pytest.raises(DufuError, match="differs from PyTorch by"):
            compare(graph, session)
        with torch.no_grad():
            weight[3] = float("nan")
        with pytest.raises(DufuError, match="not finite"):
            compare(graph, session)
    finally:
        with torch.no_grad():
            weight.copy_(before)


class Baked(DecoderGraph):
    """What a tracer makes that takes sizes for constants."""

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        scores, *present = super().forward(tensors)
        return [scores * (1.0 if tensors[1].shape[1] == 6 else 2.0), *present]


def test_a_length_that_is_baked_in_is_found(decoder: tuple[DecoderGraph, Session]) -> None:
    graph, session = decoder
    with pytest.raises(DufuError, match=r"1 × 0 \+ 1 tokens, all tokens differs"):
        compare(Baked(graph.model), session)


def test_pictures(tmp_path: Path) -> None:
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 4, "initializer_range": 0.2}
    graph = PictureGraph(made(VisionTransformer(num_classes=5, **sizes)))
    session = written(graph, tmp_path)
    for batch in (1, 3):
        assert_equal(graph, session, [torch.randn(batch, 3, 8, 8)])


@pytest.mark.skipif(not ALL, reason="DUFU_MODELS=all")
@pytest.mark.parametrize("opset", [20, 23, 25])
def test_newer_operators(opset: int, tmp_path: Path) -> None:
    graph = DecoderGraph(made(GPT2(**{**SMALL, "hidden_layers": 1})))
    assert compare(graph, written(graph, tmp_path, opset=opset)).difference < 1e-5


PICTURES = {"embed_dim": 32, "num_classes": 5}
SWIN = {**PICTURES, "img_size": 16, "patch_size": 2, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}
TEXT = {**{name: SMALL[name] for name in SMALL if name[0] in "vhnm"}, "hidden_layers": 1}
DECODER = {**TEXT, "ffn_hidden_size": 64}
GROUPED = {**DECODER, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": GROUPED, "Qwen3": GROUPED, "Gemma": DECODER, "Glm": GROUPED, "Glm4": GROUPED, "ChatGLM": DECODER, "OPT": DECODER,
    "Bloom": TEXT, "Mistral": {**GROUPED, "sliding_window": 6}, "Roberta": TEXT, "RobertaClassifier": TEXT, "RobertaFeatures": TEXT,
    "Albert": TEXT, "MT5": DECODER, "Bart": DECODER, "SwinTransformer": SWIN, "SwinTransformerV2": {**SWIN, "depths": [1, 1]},
    "ResMLP": {**PICTURES, "img_size": 8, "patch_size": 4, "depth": 1},
}  # fmt: skip


@pytest.mark.skipif(not ALL, reason="DUFU_MODELS=all")
@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_that_is_named_as_built(name: str, tmp_path: Path) -> None:
    model = made(getattr(dufu.models, name)(**FAMILIES[name]))
    kind = kind_of(canonical(type(model)), {})
    for graph in kind.graphs(model):
        assert compare(graph, written(graph, tmp_path)).difference < 1e-5


def test_every_family_that_is_named_as_built_is_tried_here() -> None:
    here = {"GPT2", "Llama", "Bert", "BertClassifier", "BertFeatures", "VisionTransformer", "T5", *FAMILIES}
    assert {name.rpartition(".")[2] for name in KINDS} == here


def test_impossible_settings_and_models_are_refused_by_name() -> None:
    for opset in (17, 26):
        with pytest.raises(ConfigError, match=rf"--opset {opset}: 18 to 25"):
            check_settings(opset, EXTERNAL_ABOVE)
    with pytest.raises(ConfigError, match="--external-data-above 3000000000"):
        check_settings(18, 3_000_000_000)
    with pytest.raises(NotBuiltError, match="GPT2 with num_experts=4: exporting mixtures of experts"):
        kind_of("dufu.models.gpt2.GPT2", {"num_experts": 4})
    with pytest.raises(NotBuiltError, match="Mine: exporting it to ONNX is not built"):
        kind_of("mine.Mine", {})
