"""Files of tensors, of which any rows can be read without the rest: safetensors, and PyTorch's own by its weights-only reader."""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dufu.errors import CheckpointError

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_MOST = 1 << 30  # bytes of one system call


class TensorFile(Protocol):
    """A file of named tensors."""

    path: Path

    def names(self) -> list[str]:
        """Return the tensors' names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type."""

    def rows(self, name: str, first: int, count: int, scratch: Tensor | None = None) -> Tensor:
        """Read `count` rows of a tensor's first dimension, as a matrix (count, the rest).

        Args:
            scratch: bytes that may hold the result, until the next call; None = memory of its own.
        """


def _columns(shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:])


class SafetensorsFile:
    """A safetensors file. The library checks it; rows are read by their offsets, into memory that holds nothing else.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is missing, cut short, or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(str(path), framework="np"):  # checks the header, and that the values fill the file
                pass
            with path.open("rb") as file:
                length = struct.unpack("<Q", file.read(8))[0]
                header = json.loads(file.read(length))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing") from None
        except (SafetensorError, ValueError, OSError, struct.error) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from None
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self._header: dict[str, Any] = header
        self._begin = 8 + length
        self._handle: int | None = None

    def names(self) -> list[str]:
        """See TensorFile."""
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorFile."""
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """See TensorFile.

        Raises:
            CheckpointError: a type that holds no plain numbers, such as 8 bits with a scale of their own.
        """
        kind = self._header[name]["dtype"]
        if kind not in _TYPES:
            raise CheckpointError(f"{self.path}: {name} is of type {kind}, which is not built; dufu reads {', '.join(_TYPES)}")
        return _TYPES[kind]

    def rows(self, name: str, first: int, count: int, scratch: Tensor | None = None) -> Tensor:
        """See TensorFile."""
        dtype, columns = self.dtype(name), _columns(self.shape(name))
        size = count * columns * dtype.itemsize
        if scratch is None or len(scratch) < size:
            scratch = torch.empty(size, dtype=torch.uint8)
        out = scratch[:size].view(dtype).view(count, columns)
        self.read_into(name, first, out)
        return out

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        """Fill a contiguous matrix of the tensor's own type with the rows from `first` on."""
        if not out.numel():
            return
        if self._handle is None:
            self._handle = os.open(self.path, os.O_RDONLY)
        offset = self._begin + self._header[name]["data_offsets"][0] + first * out.shape[1] * out.element_size()
        view = out.view(-1).view(torch.uint8).numpy().data
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._handle, [view[done : done + _MOST]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {name} cannot be read ({error.strerror})") from error
            if not got:
                raise CheckpointError(f"{self.path}: ends within {name}; it was changed while it was read")
            done += got

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            os.close(self._handle)  # type: ignore[arg-type]


class PickledFile:
    """A file of `torch.save`, through PyTorch's weights-only reader: whatever else it holds is refused, nothing in it is run.

    Args:
        path: the file.
        within: keys that lead to the tensors, such as ("model",); tensors in nested dicts get dotted names.

    Raises:
        CheckpointError: it is missing or damaged, or holds more than tensors and plain values.
    """

    def __init__(self, path: Path, within: tuple[str, ...] = ()) -> None:
        self.path = path
        self.content = _unpickled(path)
        value: Any = self.content
        for key in within:
            if not isinstance(value, dict) or key not in value:
                raise CheckpointError(f"{path}: has no {'.'.join(within)}")
            value = value[key]
        self._tensors: dict[str, Tensor] = {}
        self._collect("", value)

    def _collect(self, prefix: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self._tensors[prefix] = value.detach()
        elif isinstance(value, dict):
            for key, inner in value.items():
                self._collect(f"{prefix}.{key}" if prefix else str(key), inner)

    def names(self) -> list[str]:
        """See TensorFile."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorFile."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """See TensorFile."""
        return self._tensors[name].dtype

    def rows(self, name: str, first: int, count: int, scratch: Tensor | None = None) -> Tensor:
        """See TensorFile."""
        tensor = self._tensors[name]
        return tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)[first : first + count]


def _unpickled(path: Path) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file of the old form cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except pickle.UnpicklingError as error:
        first = str(error).split("\n")[0]
        raise CheckpointError(
            f"{path}: holds more than tensors, or is damaged; it is not read, since reading it would run code ({first})"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: not a whole PyTorch file ({str(error).splitlines()[0]})") from None
