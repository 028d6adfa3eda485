"""Token files in Megatron's memory-mapped format, read: `PREFIX.bin` holds the tokens, `PREFIX.idx` where sequences and documents begin.

Layout of the index, little-endian: magic `MMIDIDX\\0\\0`, version 1 (u64), type code (u8), number of sequences (u64), number of document
boundaries (u64), lengths (i32 each), byte offsets (i64 each), document boundaries as sequence numbers (i64 each).
"""

from __future__ import annotations

import hashlib
import json
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dufu.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 are floating-point types, which hold no token numbers.
TYPES: dict[int, type[np.generic]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
Positions = npt.NDArray[np.int64]

_PROBES, _PROBE_BYTES = 64, 4096


def token_type(vocab_size: int) -> np.dtype[np.generic]:
    """Return the narrowest type that holds every token number: uint16 up to 65,536 words, int32 up to 2^31, then int64."""
    if vocab_size <= 1 << 16:
        return np.dtype(np.uint16)
    return np.dtype(np.int32) if vocab_size <= 1 << 31 else np.dtype(np.int64)


def last_at_most(ascending: npt.NDArray[Any], values: Positions) -> Positions:
    """Return for each value the last place of an ascending array whose entry is at most the value, or -1.

    The same as `searchsorted(…, side="right") - 1`, which would first copy the whole of an array that is not aligned in memory, as those of
    a mapped index are not; this touches a few pages only.
    """
    low = np.full(values.shape, -1, np.int64)
    high = np.full(values.shape, len(ascending), np.int64)
    while np.any(high - low > 1):
        open_ = high - low > 1
        middle = np.where(open_, (low + high) // 2, 0)
        below = ascending[middle] <= values
        low = np.where(open_ & below, middle, low)
        high = np.where(open_ & ~below, middle, high)
    return low


class IndexedTokens:
    """A pair of files, memory-mapped: opening reads the header and a few entries, however long the files.

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
        self.dtype, sequences, boundaries = _read_header(index)

        def mapped(kind: type[np.generic], offset: int, count: int) -> npt.NDArray[Any]:
            return np.memmap(index, kind, "r", offset, (count,)) if count else np.zeros(0, kind)

        self.lengths: npt.NDArray[np.int32] = mapped(np.int32, HEADER.size, sequences)
        self._offsets: npt.NDArray[np.int64] = mapped(np.int64, HEADER.size + 4 * sequences, sequences)
        self.documents: npt.NDArray[np.int64] = mapped(np.int64, HEADER.size + 12 * sequences, boundaries)
        if not boundaries or self.documents[0] != 0 or self.documents[-1] != sequences:
            ends = f"run from sequence {self.documents[0]} to {self.documents[-1]}" if boundaries else "are missing"
            raise DataError(f"{index}: its documents {ends}, but it has sequences 0 to {sequences}; the index is incomplete")
        size = data.stat().st_size
        last = int(self._offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if sequences else 0
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
        return int(self._offsets[number]) // self.dtype.itemsize

    def sequence_starts(self, first: int, last: int) -> Positions:
        """Return the positions of the first tokens of sequences `first` to `last`; `last = len(self)` includes the end."""
        starts = np.array(self._offsets[first : last + 1], np.int64) // self.dtype.itemsize
        return starts if last < len(self) else np.append(starts, len(self.tokens))

    def sequence_of(self, positions: Positions) -> Positions:
        """Return the number of the sequence in which each token position lies."""
        return last_at_most(self._offsets, positions * self.dtype.itemsize)

    def document_start(self, number: int) -> int:
        """Return the position of a document's first token; the number of documents gives the end."""
        return self.sequence_start(int(self.documents[number]))

    def document_of(self, positions: Positions) -> Positions:
        """Return the number of the document in which each token position lies (each document being one or more sequences)."""
        return last_at_most(self.documents, self.sequence_of(positions))

    def get(self, number: int, offset: int = 0, length: int | None = None) -> npt.NDArray[np.integer]:
        """Return a sequence, or the stretch of it that begins at `offset` and is at most `length` tokens long."""
        start, size = self.sequence_start(number), int(self.lengths[number])
        stop = size if length is None else min(size, offset + length)
        return self.tokens[start + offset : start + stop]

    def read(self, start: int, stop: int, vocab_size: int) -> npt.NDArray[np.int64]:
        """Return the tokens at positions `start` to `stop`.

        Raises:
            DataError: one is not below `vocab_size`: the file belongs to another tokenizer.
        """
        tokens = np.array(self.tokens[start:stop], np.int64)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            wrong = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
            raise DataError(
                f"{self.prefix}.bin: token {start + wrong} is number {tokens[wrong]}, but the tokenizer has {vocab_size} tokens; "
                f"another tokenizer made this file"
            )
        return tokens

    @cached_property
    def note(self) -> dict[str, Any]:
        """Return what `PREFIX.json` says of the tokens' origin; empty for files of another program.

        Raises:
            DataError: the file is no JSON, or speaks of other tokens.
        """
        path = Path(f"{self.prefix}.json")
        if not path.is_file():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path}: not JSON ({error}); remove it, or preprocess again with --overwrite") from error
        if not isinstance(found, dict) or "tokenizer" not in found:
            return {}  # some other program's file that happens to have this name
        if found.get("tokens") != len(self.tokens):
            raise DataError(
                f"{path}: speaks of {found.get('tokens')} tokens, but {self.prefix}.bin holds {len(self.tokens)}; preprocess again"
            )
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the content: sizes, samples of both files, and the full hashes that dufu's own `PREFIX.json` records.

        Files of another program are known by sizes and samples alone, since reading all of them could take hours.
        """
        digest = hashlib.sha256(json.dumps(self.note.get("content", {}), sort_keys=True).encode())
        for suffix in (".bin", ".idx"):
            path = Path(self.prefix + suffix)
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                for probe in range(_PROBES + 1):
                    file.seek(max(0, size - _PROBE_BYTES) * probe // _PROBES)
                    digest.update(file.read(_PROBE_BYTES))
        return digest.hexdigest()[:16]


def _read_header(index: Path) -> tuple[np.dtype[np.generic], int, int]:
    """Return the tokens' type, the number of sequences and the number of document boundaries."""
    with index.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        old = " (TNTIDX is the older format; preprocess the text again)" if header.startswith(b"TNTIDX") else ""
        raise DataError(f"{index}: not a token index, it does not begin with MMIDIDX{old}")
    _, version, code, sequences, boundaries = HEADER.unpack(header)
    if version != 1 or code not in TYPES:
        raise DataError(
            f"{index}: version {version}, type code {code}; this program reads version 1, codes {', '.join(map(str, TYPES))}"
        )
    expected, found = HEADER.size + 12 * sequences + 8 * boundaries, index.stat().st_size
    if found != expected:
        raise DataError(f"{index}: {found} bytes, but its header announces {expected}; the file is cut short or damaged")
    return np.dtype(TYPES[code]), sequences, boundaries
