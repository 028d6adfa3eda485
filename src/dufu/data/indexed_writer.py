"""Token files in Megatron's memory-mapped format, written: in memory that does not grow with their size, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dufu.data.claim import claim, disk_errors, part_of, release, sync, sync_folder
from dufu.data.indexed import HEADER, MAGIC, TYPES
from dufu.errors import DataError

_CODES = {np.dtype(kind): code for code, kind in TYPES.items()}
_CHUNK = 1 << 20
_LONGEST = (1 << 31) - 1


class IndexedWriter:
    """Writes `PREFIX.bin`, `PREFIX.idx` and, if given a note, `PREFIX.json`; an error leaves nothing behind.

    Args:
        prefix: path without suffix.
        dtype: type of a token.

    Raises:
        DataError: the place cannot be written, or another process is writing there.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[np.generic]) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        if self.dtype not in _CODES:
            raise DataError(f"{prefix}: tokens of type {self.dtype}; one of {', '.join(map(str, _CODES))}")
        self.sequences = 0
        self.tokens = 0
        self._open = True
        self._digest = hashlib.sha256()
        info = np.iinfo(self.dtype)  # type: ignore[type-var]
        self._least, self._most = int(info.min), int(info.max)
        with disk_errors(self.prefix):
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            # Nameless files for what the index gathers at its end: they vanish with the process.
            self._lengths: BinaryIO = tempfile.TemporaryFile(dir=self.prefix.parent)  # type: ignore[assignment] # noqa: SIM115
            self._documents: BinaryIO = tempfile.TemporaryFile(dir=self.prefix.parent)  # type: ignore[assignment] # noqa: SIM115
            self._documents.write(np.zeros(1, np.int64).tobytes())
        self._data = claim(f"{prefix}.bin")

    def add_document(self, *sequences: npt.NDArray[np.integer] | Sequence[int]) -> None:
        """Append one document, given as one or more sequences of token numbers.

        Raises:
            DataError: a number does not fit into the type.
        """
        arrays = [np.asarray(s, np.int64) for s in sequences]
        self.add_documents(np.concatenate(arrays), [len(a) for a in arrays], [len(arrays)])

    def add_documents(self, tokens: npt.NDArray[np.integer], lengths: npt.ArrayLike, sequences: npt.ArrayLike) -> None:
        """Append many documents at once: their tokens, the length of each sequence, the number of sequences of each document.

        Raises:
            DataError: a number does not fit into the type, or the disk is full.
        """
        if tokens.size:
            for value in (int(tokens.min()), int(tokens.max())):
                if not self._least <= value <= self._most:
                    raise DataError(
                        f"{self.prefix}: token number {value} does not fit into {self.dtype} ({self._least} to {self._most})"
                    )
        content = np.ascontiguousarray(tokens, self.dtype).tobytes()
        self.tokens += len(tokens)
        self._digest.update(content)
        with disk_errors(f"{self.prefix}.bin"):
            self._data.write(content)
        self._describe(np.asarray(lengths, np.int64), np.asarray(sequences, np.int64))

    def _describe(self, lengths: npt.NDArray[np.int64], sequences: npt.NDArray[np.int64]) -> None:
        """Note lengths of sequences and numbers of sequences of documents for the index."""
        if lengths.size and int(lengths.max()) > _LONGEST:
            raise DataError(f"{self.prefix}: a sequence of {int(lengths.max())} tokens; the format holds at most {_LONGEST}")
        with disk_errors(f"{self.prefix}.idx"):
            self._lengths.write(lengths.astype(np.int32).tobytes())
            self._documents.write((self.sequences + np.cumsum(sequences)).tobytes())
        self.sequences += len(lengths)

    def complete(self, note: dict[str, Any] | None = None) -> None:
        """Write the index, and give all files their names at once.

        Args:
            note: what `PREFIX.json` shall say; the hashes of the other two files are added.
        """
        with disk_errors(self.prefix):
            sync(self._data)
            index = part_of(f"{self.prefix}.idx")
            with index.open("wb") as file:
                digest = self._write_index(file)
                sync(file)
            described = part_of(f"{self.prefix}.json")
            if note is not None:
                content = {"bin_sha256": self._digest.hexdigest(), "idx_sha256": digest}
                with described.open("wb") as file:
                    file.write(json.dumps({**note, "content": content}, indent=1, ensure_ascii=False).encode())
                    sync(file)
            # The index goes before the tokens change and comes back after them: at no moment do an old and a new file form a pair.
            Path(f"{self.prefix}.json").unlink(missing_ok=True)
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)
            os.replace(part_of(f"{self.prefix}.bin"), f"{self.prefix}.bin")
            if note is not None:
                os.replace(described, f"{self.prefix}.json")
            os.replace(index, f"{self.prefix}.idx")
            sync_folder(self.prefix.parent)
        self._close()

    def _write_index(self, file: BinaryIO) -> str:
        digest = hashlib.sha256()

        def put(content: bytes) -> None:
            digest.update(content)
            file.write(content)

        put(HEADER.pack(MAGIC, 1, _CODES[self.dtype], self.sequences, self._documents.tell() // 8))
        self._lengths.seek(0)
        while content := self._lengths.read(4 * _CHUNK):
            put(content)
        self._lengths.seek(0)
        position = 0
        while content := self._lengths.read(4 * _CHUNK):
            ends = position + np.cumsum(np.frombuffer(content, np.int32), dtype=np.int64) * self.dtype.itemsize
            put(np.concatenate([[position], ends[:-1]]).astype(np.int64).tobytes())
            position = int(ends[-1])
        self._documents.seek(0)
        while content := self._documents.read(8 * _CHUNK):
            put(content)
        return digest.hexdigest()

    def abandon(self) -> None:
        """Throw away what was written."""
        if self._open:
            for suffix in (".bin", ".idx", ".json"):
                part_of(f"{self.prefix}{suffix}").unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        self._open = False
        for file in (self._lengths, self._documents, self._data):
            release(file)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abandon()
        elif self._open:
            try:
                self.complete()
            except BaseException:
                self.abandon()
                raise
