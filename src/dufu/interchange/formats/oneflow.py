"""OneFlow's folders, in which LiBai keeps its checkpoints: each tensor a folder with `meta`, a text of shape and type, and `out`, its bytes.

In the older form these folders have the tensors' names. In the newer one they are numbered, and a pickle says which is which; it is
read with stand-ins for OneFlow's classes, and nothing in it is run.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dufu.errors import CheckpointError, NotBuiltError
from dufu.interchange.formats.base import Source

_META, _DATA, _NAMES, _DONE = "meta", "out", "pickled_data", "snapshot_done"
_TYPES = {
    "kFloat": torch.float32, "kDouble": torch.float64, "kFloat16": torch.float16, "kBFloat16": torch.bfloat16,
    "kInt8": torch.int8, "kUInt8": torch.uint8, "kInt32": torch.int32, "kInt64": torch.int64, "kBool": torch.bool,
}  # fmt: skip


def is_oneflow(path: Path) -> bool:
    """Say whether a path is a folder that OneFlow saved, or one of LiBai's that holds such a folder."""
    return _within(path) is not None


def _within(path: Path) -> Path | None:
    for folder in (path, path / "model"):
        if folder.is_dir() and ((folder / _NAMES).is_file() or (folder / _DONE).is_file()):
            return folder
    return None


class OneFlowFolder:
    """A folder of OneFlow's as a file of tensors.

    Args:
        path: the folder.

    Raises:
        CheckpointError: a tensor's folder is incomplete or of the wrong size, or the pickle holds more than tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places = _named(path) if (path / _NAMES).is_file() else {p.name: p for p in sorted(path.iterdir()) if p.is_dir()}
        self._forms = {name: _form(place) for name, place in self._places.items()}
        if not self._forms:
            raise CheckpointError(f"{path}: holds no tensors")

    def names(self) -> list[str]:
        """See TensorFile."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorFile."""
        return self._forms[name][0]

    def dtype(self, name: str) -> torch.dtype:
        """See TensorFile."""
        return self._forms[name][1]

    def rows(self, name: str, first: int, count: int, scratch: Tensor | None = None) -> Tensor:
        """See TensorFile."""
        shape, dtype = self._forms[name]
        columns = math.prod(shape[1:])
        size = columns * dtype.itemsize
        with (self._places[name] / _DATA).open("rb") as file:
            file.seek(first * size)
            content = file.read(count * size)
        if len(content) != count * size:
            raise CheckpointError(f"{self._places[name] / _DATA}: ends within {name}; it was changed while it was read")
        return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8)).view(dtype).view(count, columns)


def _form(place: Path) -> tuple[tuple[int, ...], torch.dtype]:
    try:
        text = (place / _META).read_text(encoding="utf-8")
        size = os.path.getsize(place / _DATA)
    except (OSError, UnicodeDecodeError):
        raise CheckpointError(f"{place}: is no whole tensor of OneFlow's ({_META} and {_DATA} are wanted)") from None
    kind = re.search(r"data_type:\s*(\w+)", text)
    if kind is None or kind.group(1) not in _TYPES:
        raise CheckpointError(f"{place / _META}: type {kind.group(1) if kind else 'none'} is not built; {', '.join(_TYPES)} are")
    shape, dtype = tuple(int(n) for n in re.findall(r"\bdim:\s*(\d+)", text)), _TYPES[kind.group(1)]
    if size != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{place / _DATA}: has {size} bytes, {_META} says {list(shape)} of {kind.group(1)}: cut short or damaged"
        )
    return shape, dtype


class _Thing:
    """An object of OneFlow's in the pickle: what was said of it, and nothing more."""

    def __init__(self, *values: Any, **named: Any) -> None:
        self.said: Any = None

    def __setstate__(self, state: Any) -> None:
        self.said = state


class _Names(pickle.Unpickler):
    """Reads which tensor is called what. No class of the file is imported; one that is not OneFlow's is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a class."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module.split(".")[0] == "oneflow" or (module, name) in (("copyreg", "_reconstructor"), ("builtins", "object")):
            return _Thing
        raise pickle.UnpicklingError(f"{module}.{name}")


def _named(path: Path) -> dict[str, Path]:
    try:
        content = _Names(io.BytesIO((path / _NAMES).read_bytes())).load()
        tensors = content["data"]
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path / _NAMES}: holds more than names of tensors, or is damaged; it is not read, since reading it would run code ({error})"
        ) from None
    except Exception as error:  # whatever a damaged pickle leads to
        raise CheckpointError(f"{path / _NAMES}: not a whole list of OneFlow's ({type(error).__name__}: {error})") from None
    found: dict[str, Path] = {}
    _collect("", tensors, path, found)
    return found


def _collect(prefix: str, value: Any, path: Path, found: dict[str, Path]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _collect(f"{prefix}.{key}" if prefix else str(key), inner, path, found)
    elif isinstance(value, _Thing):
        where = value.said.get("path") if isinstance(value.said, dict) else None
        if not isinstance(where, str):
            raise NotBuiltError(f"{path / _NAMES}: {prefix} lies within the pickle, which is not built; save it as external data")
        if Path(where).name != where:
            raise CheckpointError(f"{path / _NAMES}: {prefix} lies in {where}, which is not beside it")
        found[prefix] = path / where


def open_oneflow(path: Path) -> Source:
    """Open a folder that OneFlow saved; see OneFlowFolder."""
    folder = _within(path)
    assert folder is not None
    return Source(path, [OneFlowFolder(folder)])
