"""Files that are either whole or absent."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Wait until a file's, or a folder's, content lies on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> dict[str, Any]:
    """Return a file's size and sha256."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            found.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": found.hexdigest()}


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
