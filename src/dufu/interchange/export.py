"""Foreign tensors out of our weights, one at a time, and whole Hugging Face folders."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dufu.errors import CheckpointError, ConfigError
from dufu.interchange.files import sync, write_tensors
from dufu.models.names import Shape, Table
from dufu.parallel.region import Block, Region

Read = Callable[[str, Shape, Region, Tensor], None]  # as WeightSource.read
DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16)}


def foreign_tensors(table: Table, shapes: Mapping[str, Shape], read: Read) -> Iterator[tuple[str, Tensor]]:
    """Yield every foreign tensor, float32, in the order of our parameters; each is let go before the next is made.

    Args:
        shapes: of our parameters.
        read: fills memory with a region of one of them.
    """
    needed = table.foreign_shapes(shapes)
    makers: dict[str, list[tuple[str, Any]]] = {}
    for rule in table.rules:
        for part in rule.parts:
            makers.setdefault(part.name, []).append((rule.ours, part))
    for name, parts in makers.items():
        values = torch.zeros(needed[name], dtype=torch.float32)
        for ours, part in parts:
            _place(values, part, ours, shapes[ours], read)
        yield name, values


def _place(values: Tensor, part: Any, ours: str, shape: Shape, read: Read) -> None:
    cols = math.prod(shape[1:])
    if part.matrix is None:
        rows = (shape[0] if shape else 1) - part.row if part.rows is None else part.rows
        block = Block(part.row, rows, 0, cols)
    else:
        rows, cols = part.matrix
        block = Block(part.row, 1, part.col, rows * cols)
    flat = values.view(values.shape[0] if values.dim() else 1, -1)
    direct = not part.transposed and flat.shape[1] == cols
    memory = flat[part.start : part.start + rows].view(-1) if direct else torch.empty(rows * cols)
    read(ours, shape, Region((block,)), memory)
    if not direct:
        flat[:, part.start : part.start + rows] = memory.view(rows, cols).t()


def dtype_of(name: str) -> tuple[str, torch.dtype]:
    """Return safetensors' and PyTorch's type of a name such as "bfloat16".

    Raises:
        ConfigError: no such type is written.
    """
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name}: one of {', '.join(DTYPES)}")
    return DTYPES[name]


def size_of(text: str) -> int:
    """Return a size such as "5GB" in bytes.

    Raises:
        ConfigError: it is none.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "B": 1, "": 1}
    number = text.rstrip("KkMmGgIiBb")
    unit = text[len(number) :].upper()
    try:
        value = int(float(number) * units[unit])
    except (ValueError, KeyError):
        raise ConfigError(f'"{text}": a size such as "5GB" or "500MiB"') from None
    if value < 1:
        raise ConfigError(f'"{text}": above 0')
    return value


class OutFolder:
    """A folder that is written beside its place, and moved there when it is whole.

    Args:
        path: where it shall be.

    Raises:
        ConfigError: something is there already, or its parent cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path}: exists already; give another name, or remove it")
        self.path = path
        self.part = path.with_name(f".{path.name}.part{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.part.mkdir()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be made ({error.strerror})") from error

    def __enter__(self) -> Path:
        return self.part

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            shutil.rmtree(self.part, ignore_errors=True)
            if isinstance(error, OSError):
                raise CheckpointError(f"{self.path}: cannot be written ({error.strerror})") from error
            return
        if self.path.is_dir():
            self.path.rmdir()
        os.replace(self.part, self.path)
        sync(self.path.parent)


def write_weights(
    folder: Path, table: Table, shapes: Mapping[str, Shape], read: Read, dtype: str = "float32", largest: int = 5 * 10**9
) -> int:
    """Write sharded safetensors and their index into a folder.

    Args:
        read: fills memory with a region of one of our parameters.
        dtype: of the file.
        largest: bytes of one file, as far as whole tensors allow.

    Returns:
        The bytes of the tensors.
    """
    kind, torch_type = dtype_of(dtype)
    size = torch_type.itemsize
    needed = table.foreign_shapes(shapes)
    order = list(dict.fromkeys(part.name for rule in table.rules for part in rule.parts))
    shards: list[list[str]] = [[]]
    filled = 0
    for name in order:
        numel = math.prod(needed[name]) * size
        if shards[-1] and filled + numel > largest:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += numel
    total = sum(math.prod(needed[name]) for name in order) * size
    made = foreign_tensors(table, shapes, read)
    count, placed = len(shards), {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        placed.update(dict.fromkeys(names, file))
        forms = {name: (kind, needed[name]) for name in names}
        write_tensors(folder / file, forms, _arrays(made, names, torch_type), {"format": "pt"})
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return total


def _arrays(made: Iterator[tuple[str, Tensor]], names: list[str], dtype: torch.dtype) -> Iterator[np.ndarray[Any, Any]]:
    for expected in names:
        name, values = next(made)
        assert name == expected
        yield values.to(dtype).view(-1).view(torch.uint8).numpy()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as people read it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
