"""A graph as a file: traced with free sizes by torch.export, cleaned, and saved with its weights inside or beside it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dufu.errors import ConfigError, NotBuiltError
from dufu.onnx.graph import Axes, Graph
from dufu.onnx.session import first_line

FIRST_OPSET, LAST_OPSET = 18, 25  # what torch.onnx writes without falling back to another one
PROTOBUF_LIMIT = (1 << 31) - 1  # bytes; one file cannot hold more
EXTERNAL_ABOVE = 2_000_000_000  # bytes of weights; the rest of the limit is for the graph


def check_settings(opset: int, external_above: int) -> None:
    """Raise ConfigError for an operator set or a limit that cannot be."""
    if not FIRST_OPSET <= opset <= LAST_OPSET:
        raise ConfigError(f"--opset {opset}: {FIRST_OPSET} to {LAST_OPSET} are built")
    if not 0 <= external_above <= EXTERNAL_ABOVE:
        raise ConfigError(f"--external-data-above {external_above}: 0 to {EXTERNAL_ABOVE}; one ONNX file cannot hold more")


@contextmanager
def _quietly() -> Iterator[None]:
    """Hold back what the exporter tells its own developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def write_graph(graph: Graph, folder: Path, opset: int, external_above: int) -> list[Path]:
    """Write a graph into a folder.

    Args:
        opset: version of the operator set.
        external_above: with more bytes of weights than this they go into a file beside the graph, to which it refers by name alone.

    Returns:
        The files written.

    Raises:
        NotBuiltError: PyTorch cannot write the model as a graph.
    """
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass
    from onnxscript.optimizer import optimize_ir

    with _quietly():
        model = _trace(graph, opset)
        # Weights stay as they are: a transposed copy would be a second one of a tied matrix. Runtimes make theirs when they load.
        optimize_ir(model, should_fold=lambda node: False if node.op_type == "Transpose" else None)
        ClearMetadataAndDocStringPass()(model)
    _name_sizes(model.graph.inputs, graph.inputs())
    _name_sizes(model.graph.outputs, graph.outputs())
    model.producer_name = "dufu"
    path = folder / graph.file
    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    if weights <= external_above:
        onnx_ir.save(model, path)
        return [path]
    beside = f"{graph.file}_data"
    onnx_ir.save(model, path, external_data=beside)
    return [path, folder / beside]


def _trace(graph: Graph, opset: int) -> Any:
    trial = graph.traced()
    free = [dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in graph.inputs().values()]
    try:
        # The fused kernels promise an order of memory that their decomposition does not keep.
        with sdpa_kernel(SDPBackend.MATH):
            program: Any = torch.onnx.export(
                graph,
                (trial.tensors,),
                dynamo=True,
                input_names=list(graph.inputs()),
                output_names=list(graph.outputs()),
                dynamic_shapes=(free,),
                opset_version=opset,
                optimize=False,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        name = type(graph.model).__name__
        raise NotBuiltError(f"{name}: PyTorch does not write it as an ONNX graph ({first_line(_cause(error))})") from error
    made = program.model.opset_imports.get("")
    if made != opset:
        raise NotBuiltError(f"--opset {opset}: this model comes out in {made} only; leave --opset out")
    return program.model


def _cause(error: BaseException) -> Exception:
    """Return the innermost error, which says what the outer ones only pass on."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def _name_sizes(values: Any, axes: Mapping[str, Axes]) -> None:
    """Call the free sizes by names that say what they are, instead of the tracer's numbers."""
    import onnx_ir

    for value, free in zip(values, axes.values(), strict=True):
        shape = list(value.shape)
        for dim, name in free.items():
            shape[dim] = onnx_ir.SymbolicDim(name)
        value.shape = onnx_ir.Shape(shape)
