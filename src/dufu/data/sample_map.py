"""The map from a sample's number to its stretch of tokens, where that is no plain formula: an int64 file, mapped into memory.

A map is made once for each content (tokens, split, length) and kept in the cache; opening it reads 64 bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dufu.data.claim import claim, disk_errors, part_of, release, sync, sync_folder

_MAGIC = b"DUFUMAP1"
_HEADER = struct.Struct("<8sQQ32s8x")  # magic, rows, columns, sha256 of the description
Rows = npt.NDArray[np.int64]


def default_cache() -> Path:
    """Return the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dufu"


def open_map(describes: Any, columns: int, make: Callable[[], Iterator[Rows]], cache: str | Path | None = None) -> Rows:
    """Return the map (rows, columns) of what `describes` says, from the cache or made now.

    Several processes may call this at once: one makes the map, the others wait for it.

    Args:
        describes: everything that decides the rows, as JSON would write it; the key of the cache.
        columns: numbers of a row.
        make: yields the rows piece by piece.
        cache: folder; None = the user's.

    Raises:
        DataError: the cache cannot be written.
    """
    key = hashlib.sha256(json.dumps([columns, describes]).encode()).digest()
    path = (Path(cache) if cache else default_cache()) / "samples" / f"{key.hex()[:32]}.map"
    found = _open(path, columns, key)
    if found is not None:
        return found
    file = claim(path, wait=True)
    try:
        found = _open(path, columns, key)
        if found is None:
            with disk_errors(path):
                _write(file, make(), columns, key)
                os.replace(part_of(path), path)
                sync_folder(path.parent)
            found = _open(path, columns, key)
            assert found is not None
        return found
    finally:
        part_of(path).unlink(missing_ok=True)
        release(file)


def _write(file: BinaryIO, pieces: Iterator[Rows], columns: int, key: bytes) -> None:
    rows = 0
    file.write(bytes(_HEADER.size))
    for piece in pieces:
        file.write(np.ascontiguousarray(piece, np.int64).tobytes())
        rows += len(piece)
    file.seek(0)
    file.write(_HEADER.pack(_MAGIC, rows, columns, key))
    sync(file)


def _open(path: Path, columns: int, key: bytes) -> Rows | None:
    """Return a finished map, or None where there is none, or one that is cut short or of something else."""
    try:
        with path.open("rb") as file:
            magic, rows, width, kept = _HEADER.unpack(file.read(_HEADER.size))
    except (FileNotFoundError, NotADirectoryError, struct.error):
        return None
    if (magic, width, kept) != (_MAGIC, columns, key) or path.stat().st_size != _HEADER.size + 8 * rows * columns:
        return None
    if not rows:
        return np.zeros((0, columns), np.int64)
    return np.memmap(path, np.int64, "r", _HEADER.size, (rows, columns))
