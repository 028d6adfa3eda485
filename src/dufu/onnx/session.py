"""onnxruntime: a graph opened, and called with torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dufu.errors import CheckpointError, ConfigError


def require(*modules: str) -> None:
    """Raise ConfigError, with the line that installs them, when modules of the extra `dufu[onnx]` are missing."""
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            raise ConfigError(f"ONNX needs {name}, which is not installed ({error}); pip install 'dufu[onnx]'") from None


class Session:
    """A graph in a file, run on the CPU.

    Args:
        path: the file; data outside of it lie beside it.

    Raises:
        ConfigError: onnxruntime is not installed.
        CheckpointError: the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        require("onnxruntime")
        import onnxruntime

        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        try:
            self._session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its classes of errors have no common base but this
            raise CheckpointError(
                f"{path}: onnxruntime cannot open it; it is damaged or incomplete ({first_line(error)})"
            ) from None
        self.path = path
        self.inputs: list[str] = [each.name for each in self._session.get_inputs()]
        self.outputs: list[str] = [each.name for each in self._session.get_outputs()]

    def __call__(self, tensors: Sequence[Tensor], outputs: Sequence[str] | None = None) -> list[Tensor]:
        """Run the graph.

        Args:
            tensors: the inputs in the graph's order.
            outputs: names of those wanted; None = all.
        """
        given = {name: np.ascontiguousarray(tensor.detach().numpy()) for name, tensor in zip(self.inputs, tensors, strict=True)}
        try:
            found = self._session.run(list(outputs or self.outputs), given)
        except Exception as error:  # see above
            raise CheckpointError(f"{self.path}: onnxruntime cannot run it ({first_line(error)})") from None
        return [torch.from_numpy(array) for array in found]


def first_line(error: Exception, most: int = 300) -> str:
    """Return the first line of an error's text, cut to `most` characters."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:most]
