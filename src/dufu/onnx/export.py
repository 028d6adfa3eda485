"""`dufu export onnx`: a trained model as ONNX graphs that other programs run, and `dufu generate` runs without PyTorch's weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dufu.errors import ConfigError, NotBuiltError
from dufu.interchange.export import OutFolder, write_json
from dufu.interchange.files import sync
from dufu.interchange.folder import is_folder
from dufu.models.hf import family_of
from dufu.onnx.compare import Compared, compare
from dufu.onnx.decoder import DecoderGraph
from dufu.onnx.encoder import EncoderGraph
from dufu.onnx.encoder_decoder import SideGraph, graphs_of
from dufu.onnx.facts import Facts
from dufu.onnx.graph import Graph
from dufu.onnx.picture import PictureGraph
from dufu.onnx.session import Session, require
from dufu.onnx.write import EXTERNAL_ABOVE, FIRST_OPSET, check_settings, write_graph
from dufu.parallel.process import world_size
from dufu.training.checkpoint import find_weights
from dufu.training.effective import effective_config
from dufu.training.export_hf import config_fields
from dufu.training.load import Loaded, load
from dufu.training.pretrained import ORIGIN, config_of_folder, named_model


@dataclass(frozen=True)
class Kind:
    """How models of one kind become graphs.

    Args:
        name: as in Facts.
        graphs: makes them, in the order in which they are called.
        facts: what Facts has to say beside.
    """

    name: str
    graphs: Callable[[Any], list[Graph]]
    facts: Callable[[list[Any]], dict[str, Any]]


def _decoder_facts(graphs: list[DecoderGraph]) -> dict[str, Any]:
    graph = graphs[0]
    return {"vocab_size": graph.vocabulary, "max_seq_length": graph.longest, "caches": [list(shape) for shape in graph.shapes]}


def _encoder_facts(graphs: list[EncoderGraph]) -> dict[str, Any]:
    return {"vocab_size": graphs[0].vocabulary, "max_seq_length": graphs[0].longest}


def _encoder_decoder_facts(graphs: list[SideGraph]) -> dict[str, Any]:
    graph, model = graphs[0], graphs[0].model
    start = -1 if model.start_token is None else model.start_token
    caches = [list(shape) for shape in graph.shapes]
    return {"vocab_size": graph.vocabulary, "max_seq_length": model.longest or 0, "caches": caches, "start_token": start}


DECODER = Kind("decoder", lambda model: [DecoderGraph(model)], _decoder_facts)
ENCODER = Kind("encoder", lambda model: [EncoderGraph(model)], _encoder_facts)
ENCODER_DECODER = Kind("encoder_decoder", graphs_of, _encoder_decoder_facts)
PICTURE = Kind("picture", lambda model: [PictureGraph(model)], lambda graphs: {})

# How a model is loaded to be traced, whatever it was trained with.
PLAIN = ("train.amp.enabled=false", "graph.enabled=false", "train.input_placement_device=cpu")

# Our classes by the path under which their families know them.
KINDS = {
    "dufu.models.gpt2.GPT2": DECODER,
    "dufu.models.llama.Llama": DECODER,
    "dufu.models.qwen.Qwen2": DECODER,
    "dufu.models.qwen.Qwen3": DECODER,
    "dufu.models.mistral.Mistral": DECODER,
    "dufu.models.gemma.Gemma": DECODER,
    "dufu.models.glm.Glm": DECODER,
    "dufu.models.glm.Glm4": DECODER,
    "dufu.models.chatglm.ChatGLM": DECODER,
    "dufu.models.opt.OPT": DECODER,
    "dufu.models.bloom.Bloom": DECODER,
    "dufu.models.bert.Bert": ENCODER,
    "dufu.models.bert.BertClassifier": ENCODER,
    "dufu.models.bert.BertFeatures": ENCODER,
    "dufu.models.roberta.Roberta": ENCODER,
    "dufu.models.roberta.RobertaClassifier": ENCODER,
    "dufu.models.roberta.RobertaFeatures": ENCODER,
    "dufu.models.albert.Albert": ENCODER,
    "dufu.models.t5.T5": ENCODER_DECODER,
    "dufu.models.t5.MT5": ENCODER_DECODER,
    "dufu.models.bart.Bart": ENCODER_DECODER,
    "dufu.models.vit.VisionTransformer": PICTURE,
    "dufu.models.swin.SwinTransformer": PICTURE,
    "dufu.models.swin.SwinTransformerV2": PICTURE,
    "dufu.models.resmlp.ResMLP": PICTURE,
}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        files: paths of graphs and their data.
        compared: of each graph with PyTorch; empty where nothing was checked.
    """

    files: list[Path]
    compared: list[Compared]


def kind_of(target: str, cfg: Mapping[str, Any]) -> Kind:
    """Return how a model becomes graphs.

    Args:
        target: dotted path of its class.
        cfg: its arguments.

    Raises:
        NotBuiltError: it does not.
    """
    name = target.rpartition(".")[2]
    if target not in KINDS:
        built = ", ".join(known.rpartition(".")[2] for known in KINDS)
        raise NotBuiltError(f"{name}: exporting it to ONNX is not built; {built} are")
    if cfg.get("num_experts"):
        raise NotBuiltError(f"{name} with num_experts={cfg['num_experts']}: exporting mixtures of experts to ONNX is not built")
    return KINDS[target]


def export_onnx(
    folder: str | Path,
    out: str | Path,
    opset: int = FIRST_OPSET,
    external_above: int = EXTERNAL_ABOVE,
    check: bool = True,
    tokenizer: str | None = None,
) -> Exported:
    """Write a model as ONNX graphs, compared with PyTorch before they appear at `out`.

    Args:
        folder: a run's folder, a checkpoint or a Hugging Face folder.
        out: a folder that does not exist yet, or is empty.
        opset: version of the operator set.
        external_above: with more bytes of weights than this they lie in a file beside the graph.
        check: whether onnxruntime's numbers are compared with PyTorch's.
        tokenizer: that of a folder that holds none; see `dufu.data.tokenizer.load_tokenizer`.

    Raises:
        ConfigError: a setting that cannot be, `out` holds something, or the extra is not installed.
        NotBuiltError: the model cannot be exported.
        DufuError: the graph's numbers are not PyTorch's.
    """
    check_settings(opset, external_above)
    require("onnx", "onnxscript", *(["onnxruntime"] if check else []))
    if world_size() > 1:
        raise ConfigError(f"dufu export onnx runs in one process, not in {world_size()}")
    path = find_weights(folder)
    config = effective_config(config_of_folder(path) if is_folder(path) else path / "config.yaml")
    target, cfg = named_model(config.model)
    kind = kind_of(target, cfg)
    place = OutFolder(Path(out))
    with place as part:
        named = [] if tokenizer is None else [f"tokenization.tokenizer={tokenizer}"]
        loaded = load(folder, [*PLAIN, *named])
        exported = _write(loaded, kind, target, cfg, part, opset, external_above, check)
    return Exported([place.path / file.name for file in exported.files], exported.compared)


def _write(
    loaded: Loaded, kind: Kind, target: str, cfg: dict[str, Any], folder: Path, opset: int, external_above: int, check: bool
) -> Exported:
    graphs = kind.graphs(loaded.distributed.model)
    files: list[Path] = []
    compared: list[Compared] = []
    for graph in graphs:
        files += write_graph(graph, folder, opset, external_above)
        if check:
            compared.append(compare(graph, Session(folder / graph.file)))
    ends = list(loaded.end_tokens)
    Facts(
        kind.name, target, [g.file for g in graphs], end_tokens=ends, prefix=list(loaded.prefix), opset=opset, **kind.facts(graphs)
    ).write(folder)
    if kind is not PICTURE:
        loaded.tokenizer.save(folder)
    _write_others(loaded, target, cfg, folder)
    for path in folder.iterdir():
        sync(path)
    return Exported(files, compared)


def _write_others(loaded: Loaded, target: str, cfg: dict[str, Any], folder: Path) -> None:
    """Write what other tools want beside the graphs, where the model has a form there; dufu does not need it."""
    path = loaded.checkpoint
    origin = path if is_folder(path) else path.parent.parent / ORIGIN
    for name in ("generation_config.json", "preprocessor_config.json"):
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
    try:
        fields = family_of(target).write(target, cfg)
    except ConfigError:
        return
    tokenizer = None if KINDS[target] is PICTURE else loaded.tokenizer
    write_json(folder / "config.json", config_fields(fields, origin, "float32", tokenizer))
