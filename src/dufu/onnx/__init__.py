"""Models as ONNX graphs: written, compared with PyTorch, and run by onnxruntime. Needs the extra `dufu[onnx]`."""

from dufu.onnx.export import Exported, export_onnx
from dufu.onnx.facts import Facts, holds_graphs
from dufu.onnx.runtime import LoadedOnnx, OnnxDecoder, load_onnx

__all__ = ["Exported", "Facts", "LoadedOnnx", "OnnxDecoder", "export_onnx", "holds_graphs", "load_onnx"]
