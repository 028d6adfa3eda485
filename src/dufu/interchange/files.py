"""Files that are either whole or absent."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

_CHUNK = 1 << 22  # bytes
_BEHIND = 1 << 25  # bytes after which the disk is told to begin


def sync(path: Path) -> None:
    """Wait until a file's, or a folder's, content lies on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Digest:
    """A sha256 that is made in a thread, while the disk works on the next chunk."""

    def __init__(self) -> None:
        self._found = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "dufu-digest")
        self._last: Future[None] | None = None
        self.bytes = 0

    def update(self, chunk: Any) -> None:
        """Take in a chunk, which must stay as it is until the one after next."""
        if self._last is not None:
            self._last.result()
        self._last = self._thread.submit(self._found.update, chunk)
        self.bytes += len(chunk)

    def result(self) -> dict[str, Any]:
        """Return size and sha256."""
        self._thread.shutdown(wait=True)
        return {"bytes": self.bytes, "sha256": self._found.hexdigest()}


def digest(path: Path) -> dict[str, Any]:
    """Return a file's size and sha256."""
    found = _Digest()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.result()


def _begin_to_write(handle: int, start: int, length: int) -> None:
    """Let the disk begin with a stretch of a file, without waiting for it (Linux writes what it is advised to forget)."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, start, length, os.POSIX_FADV_DONTNEED)


_TYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of a number, by the format's names of the types


def write_tensors(
    path: Path,
    forms: Mapping[str, tuple[str, tuple[int, ...]]],
    values: Iterable[np.ndarray[Any, Any]],
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write a safetensors file one tensor at a time, and return its size and sha256.

    The library's own writer copies everything before it writes, and the file would have to be read again for its checksum.
    The format (https://github.com/huggingface/safetensors): the header's length in 8 bytes, a JSON header, the values.

    Args:
        forms: type, such as "F32", and shape of each tensor, in order.
        values: their bytes, in the same order; each is let go before the next is asked for.
        metadata: texts for the header.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (kind, shape) in forms.items():
        size = _TYPES[kind] * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    found, begun = _Digest(), 0
    with path.open("wb") as file:
        for part in (struct.pack("<Q", len(text)), text):
            found.update(part)
            file.write(part)
        for array in values:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            for start in range(0, len(flat), _CHUNK):
                found.update(flat[start : start + _CHUNK])
                file.write(flat[start : start + _CHUNK])
                if found.bytes - begun >= _BEHIND:
                    _begin_to_write(file.fileno(), begun, found.bytes - begun)
                    begun = found.bytes
        file.flush()
        os.fsync(file.fileno())
    result = found.result()
    if result["bytes"] != 8 + len(text) + offset:
        raise AssertionError(f"{path}: {result['bytes']} bytes written, {8 + len(text) + offset} announced")
    return result


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Write float32 arrays as a safetensors file, and return its size and sha256."""
    for name, array in arrays.items():
        if array.dtype != np.float32:
            raise AssertionError(f"{name} is {array.dtype}")
    return write_tensors(path, {name: ("F32", array.shape) for name, array in arrays.items()}, arrays.values())


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it has either its old content or its new one."""
    part = path.with_name(f".{path.name}.part{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)
