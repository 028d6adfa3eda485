"""Token files in Megatron's memory-mapped format: `PREFIX.bin` holds the tokens, `PREFIX.idx` where sequences and documents begin.

Layout of the index, little-endian: magic `MMIDIDX\\0\\0`, version 1 (u64), type code (u8), number of sequences (u64), number of document
boundaries (u64), lengths (i32 each), byte offsets (i64 each), document boundaries as sequence numbers (i64 each).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from dufu.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
TYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float32, 7: np.float64, 8: np.uint16,
}  # fmt: skip
_CODES = {np.dtype(kind): code for code, kind in TYPES.items()}


def token_type(vocab_size: int) -> np.dtype[np.generic]:
    """Return the narrowest type that holds every token number: uint16 up to 65,536 words, then int32."""
    return np.dtype(np.uint16) if vocab_size <= 65536 else np.dtype(np.int32)


class IndexedWriter:
    """Writes a pair of files beside their names and renames them when complete; an error leaves nothing behind.

    Args:
        prefix: path without suffix.
        dtype: type of a token.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[np.generic]) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._part = Path(f"{self.prefix}.bin.part{os.getpid()}")
        self._file = self._part.open("wb")
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._documents: list[npt.NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._sequences = 0
        info = np.iinfo(self.dtype) if np.issubdtype(self.dtype, np.integer) else None  # type: ignore[type-var]
        self._range = (int(info.min), int(info.max)) if info else None

    def add_document(self, *sequences: npt.NDArray[np.integer] | Sequence[int]) -> None:
        """Append one document, given as one or more sequences of token numbers.

        Raises:
            DataError: a number does not fit into the type.
        """
        arrays = [np.asarray(s) for s in sequences]
        self.add_documents(np.concatenate(arrays), [len(a) for a in arrays], [len(arrays)])

    def add_documents(self, tokens: npt.NDArray[np.integer], lengths: Sequence[int], sequences: Sequence[int]) -> None:
        """Append many documents at once: their tokens, the length of each sequence, the number of sequences of each document."""
        if self._range and tokens.size and not (self._range[0] <= int(tokens.min()) and int(tokens.max()) <= self._range[1]):
            raise DataError(f"{self.prefix}: token number {int(tokens.max())} does not fit into {self.dtype}")
        self._file.write(np.ascontiguousarray(tokens, self.dtype).tobytes())
        self._lengths.append(np.asarray(lengths, np.int32))
        self._documents.append(self._sequences + np.cumsum(np.asarray(sequences, np.int64)))
        self._sequences += len(lengths)

    def close(self) -> None:
        """Write the index and give both files their names."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int32)
        documents = np.concatenate(self._documents)
        index = Path(f"{self.prefix}.idx.part{os.getpid()}")
        with index.open("wb") as file:
            file.write(_HEADER.pack(MAGIC, 1, _CODES[self.dtype], len(lengths), len(documents)))
            file.write(lengths.tobytes())
            offsets = np.zeros(len(lengths), np.int64)
            np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
            file.write((offsets * self.dtype.itemsize).tobytes())
            file.write(documents.tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._part, f"{self.prefix}.bin")
        os.replace(index, f"{self.prefix}.idx")

    def abandon(self) -> None:
        """Throw away what was written."""
        self._file.close()
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class IndexedTokens:
    """A pair of files, memory-mapped: opening reads the header only.

    Args:
        prefix: path without suffix.

    Attributes:
        tokens: every token of the file, flat.
        lengths: tokens of each sequence.
        documents: sequence number at which each document begins, and the number of sequences at the end.

    Raises:
        DataError: a file is missing, is not of this format, or the two do not belong together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (index, data):
            if not path.is_file():
                raise DataError(f"{path}: no such file; {prefix} should be the prefix of a .bin/.idx pair")
        with index.open("rb") as file:
            header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise DataError(f"{index}: not a token index (it does not begin with MMIDIDX)")
        _, version, code, sequences, boundaries = _HEADER.unpack(header)
        if version != 1 or code not in TYPES:
            raise DataError(f"{index}: version {version}, type code {code}; this program reads version 1, codes 1 to 8")
        expected = _HEADER.size + 12 * sequences + 8 * boundaries
        if index.stat().st_size != expected:
            raise DataError(f"{index}: {index.stat().st_size} bytes, but its header announces {expected}")
        self.dtype = np.dtype(TYPES[code])

        def mapped(kind: type[np.generic], offset: int, count: int) -> npt.NDArray[np.generic]:
            return np.memmap(index, kind, "r", offset, (count,)) if count else np.zeros(0, kind)

        self.lengths: npt.NDArray[np.int32] = mapped(np.int32, _HEADER.size, sequences)  # type: ignore[assignment]
        self._offsets = mapped(np.int64, _HEADER.size + 4 * sequences, sequences)
        self.documents: npt.NDArray[np.int64] = mapped(np.int64, _HEADER.size + 12 * sequences, boundaries)  # type: ignore[assignment]
        size = data.stat().st_size
        last = int(self._offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if sequences else 0  # type: ignore[call-overload]
        if last != size:
            raise DataError(f"{data}: {size} bytes, but {index.name} describes {last}; the two files do not belong together")
        count = size // self.dtype.itemsize
        self.tokens: npt.NDArray[np.integer] = np.memmap(data, self.dtype, "r") if count else np.zeros(0, self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def document_count(self) -> int:
        """Return the number of documents."""
        return len(self.documents) - 1

    def sequence_start(self, number: int) -> int:
        """Return the position of a sequence's first token in `tokens`; `len(self)` gives the end."""
        if number == len(self):
            return len(self.tokens)
        return int(self._offsets[number]) // self.dtype.itemsize  # type: ignore[call-overload]

    def document_start(self, number: int) -> int:
        """Return the position of a document's first token; the number of documents gives the end."""
        return self.sequence_start(int(self.documents[number]))

    def document_of(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of the document in which each token position lies (each document being one or more sequences)."""
        sequence = np.searchsorted(self._offsets, positions * self.dtype.itemsize, side="right") - 1
        return np.searchsorted(self.documents, sequence, side="right") - 1

    def get(self, number: int, offset: int = 0, length: int | None = None) -> npt.NDArray[np.integer]:
        """Return (a stretch of) one sequence."""
        start = self.sequence_start(number) + offset
        stop = self.sequence_start(number) + int(self.lengths[number]) if length is None else start + length
        return self.tokens[start:stop]
