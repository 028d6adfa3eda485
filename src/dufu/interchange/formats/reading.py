"""Files of other programs: read without running anything in them, put together from parts, or made on the spot."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dufu.errors import CheckpointError
from dufu.interchange.folder import open_file, open_folder
from dufu.interchange.tensor_file import PickledFile, TensorFile

# Under these keys programs keep the weights beside what else a checkpoint holds.
HOLDERS = ("model", "state_dict", "module")
# What training programs keep beside the weights. Of these classes a stand-in is made that holds nothing; none is imported or called.
_STAND_INS = re.compile(
    r"megatron\..*|fairseq\..*|numpy\.(_core|core)\.multiarray\._reconstruct|numpy\.(ndarray|dtype)|numpy\.dtypes\.\w+|"
    r"numpy\.(_core|core)\.multiarray\.scalar|_codecs\.encode"
)


class StandIn:
    """In the place of an object of another program that is no weight: takes anything, holds nothing, does nothing."""

    def __init__(self, *values: Any, **named: Any) -> None:
        """Take what the object was made from."""

    def __setstate__(self, state: Any) -> None:
        """Take the object's content."""


@contextlib.contextmanager
def _harmless(path: Path) -> Iterator[None]:
    """Let the weights-only reader meet `argparse.Namespace`, and stand-ins for what training programs keep beside weights."""
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # the older form of file, or a damaged one, about which the reader itself has its say
        named = []
    allowed: list[Any] = [argparse.Namespace]
    allowed += [(StandIn, name) for name in named if _STAND_INS.fullmatch(name)]
    with torch.serialization.safe_globals(allowed):
        yield


def open_pickled(path: Path) -> PickledFile:
    """Return a file of `torch.save`, its weights alone where it holds more; nothing in it is run.

    Raises:
        CheckpointError: it is missing, damaged, or holds classes that are not known to be harmless.
    """
    with _harmless(path):
        file = PickledFile(path, ())
    if not isinstance(file.content, dict):
        raise CheckpointError(f"{path}: holds a {type(file.content).__name__} instead of named tensors")
    for key in HOLDERS:
        if isinstance(file.content.get(key), dict):
            return _part(file, key)
    return file


def _part(file: PickledFile, key: str) -> PickledFile:
    file._tensors = {}
    file._collect("", file.content[key])
    return file


def open_any(path: Path) -> list[TensorFile]:
    """Return the files of a path: a file, or a folder with an index or with one file of weights.

    Raises:
        CheckpointError: there is nothing that is read here.
    """
    if path.is_file():
        return [open_file(path) if path.suffix == ".safetensors" else open_pickled(path)]
    if not path.is_dir():
        raise CheckpointError(f"{path}: missing")
    if any(path.glob("*.index.json")) or (path / "model.safetensors").is_file():
        tensors = open_folder(path)
        return [View(tensors.where, {name: (tensors, name) for name in tensors.names()})]
    found = sorted(p for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors"))
    if len(found) != 1:
        shown = ", ".join(p.name for p in found[:4]) or "none"
        raise CheckpointError(
            f"{path}: one file of weights is wanted (.bin, .pt, .pth, .safetensors), found {shown}; name the file"
        )
    return open_any(found[0])


class View:
    """Tensors of other files under names of this one's.

    Args:
        path: for messages.
        places: name here → (who holds it, its name there).
    """

    def __init__(self, path: Path, places: Mapping[str, tuple[Any, str]]) -> None:
        self.path, self._places = path, dict(places)

    def names(self) -> list[str]:
        """See TensorFile."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorFile."""
        holder, there = self._places[name]
        found: tuple[int, ...] = holder.shape(there)
        return found

    def dtype(self, name: str) -> torch.dtype:
        """See TensorFile."""
        holder, there = self._places[name]
        found: torch.dtype = holder.dtype(there)
        return found

    def rows(self, name: str, first: int, count: int, scratch: Tensor | None = None) -> Tensor:
        """See TensorFile."""
        holder, there = self._places[name]
        found: Tensor = holder.rows(there, first, count)
        return found


class Given:
    """Tensors in memory as a file of tensors.

    Args:
        path: for messages.
        tensors: by name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path, self._tensors = path, dict(tensors)

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


class Split:
    """The shards of a tensor-parallel checkpoint as one file.

    Args:
        path: for messages.
        shards: one for each tensor-parallel process, in order; all have the same names.
        along: from a name the dimension along which it is divided, or None where each shard has the whole.

    Raises:
        CheckpointError: names or shapes of the shards differ.
    """

    def __init__(self, path: Path, shards: Sequence[TensorFile], along: Any) -> None:
        self.path, self._shards, self._along = path, list(shards), along
        first = shards[0]
        for shard in shards[1:]:
            other = set(first.names()) ^ set(shard.names())
            if other:
                raise CheckpointError(f"{shard.path}: is no shard of the same model as {first.path}: {sorted(other)[:4]} differ")
            for name in first.names():
                if shard.shape(name) != first.shape(name):
                    raise CheckpointError(
                        f"{shard.path}: {name} is {list(shard.shape(name))}, but {list(first.shape(name))} in {first.path}"
                    )

    def names(self) -> list[str]:
        """See TensorFile."""
        return self._shards[0].names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorFile."""
        shape, along = self._shards[0].shape(name), self._along(name)
        if along is None:
            return shape
        return tuple(size * len(self._shards) if dim == along else size for dim, size in enumerate(shape))

    def dtype(self, name: str) -> torch.dtype:
        """See TensorFile."""
        return self._shards[0].dtype(name)

    def rows(self, name: str, first: int, count: int, scratch: Tensor | None = None) -> Tensor:
        """See TensorFile."""
        along = self._along(name)
        if along is None:
            return self._shards[0].rows(name, first, count)
        if along == 1:
            return torch.cat([shard.rows(name, first, count) for shard in self._shards], 1)
        each, parts = self._shards[0].shape(name)[0], []
        for number, shard in enumerate(self._shards):
            low, high = max(first, number * each), min(first + count, (number + 1) * each)
            if low < high:
                parts.append(shard.rows(name, low - number * each, high - low))
        return torch.cat(parts) if parts else self._shards[0].rows(name, 0, 0)
