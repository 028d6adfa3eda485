"""Documents out of raw files: lines, blank-line-separated stretches, or JSON lines; each read as bytes, so that only `\\n` ends a line."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dufu.errors import ConfigError, DataError, nearest

DOCUMENTS = ("lines", "blank-lines")
ERRORS = ("strict", "skip", "replace")
_OTHER_ENCODINGS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


def is_json_lines(path: str | Path) -> bool:
    """Say whether a file's name marks it as JSON lines."""
    return Path(path).suffix in (".jsonl", ".json", ".ndjson")


@dataclass
class Tally:
    """What reading has met so far.

    Args:
        skipped: lines and documents left out, by reason.
        replaced: lines in which bytes were replaced.
        bytes: read of all files.
        hashes: sha256 of each file read to its end, in order.
    """

    skipped: Counter[str] = field(default_factory=Counter)
    replaced: int = 0
    bytes: int = 0
    hashes: list[str] = field(default_factory=list)


def read_documents(
    path: str | Path,
    documents: str = "lines",
    text_key: str = "text",
    errors: str = "strict",
    tally: Tally | None = None,
) -> Iterator[str]:
    """Yield the documents of a raw file, in memory of one document.

    Args:
        path: text, or JSON lines by its suffix. A byte-order mark is dropped, and a carriage return before a line's end.
        documents: how text separates them: "lines" (one a line) or "blank-lines" (a blank line ends one; its lines stay lines). JSON
            lines hold one a line.
        text_key: the field of a JSON line that holds the text. A line without it is left out and counted.
        errors: what bytes that are not UTF-8 do: "strict" (an error), "skip" the line, "replace" them by U+FFFD.
        tally: counts what was read and left out.

    Raises:
        DataError: the file is missing or not readable as what it should be; the message names file and line.
        ConfigError: an option's value is unknown.
    """
    for name, value, known in (("documents", documents, DOCUMENTS), ("errors", errors, ERRORS)):
        if value not in known:
            raise ConfigError(f'{name}="{value}": one of {", ".join(known)}{nearest(value, known)}')
    tally = Tally() if tally is None else tally
    lines = _lines(Path(path), errors, tally)
    if is_json_lines(path):
        yield from _from_json(Path(path), lines, text_key, errors, tally)
    elif documents == "blank-lines":
        yield from _stretches(line for _, line in lines)
    else:
        for _, line in lines:
            if line.strip():
                yield line
            else:
                tally.skipped["empty"] += 1


def _lines(path: Path, errors: str, tally: Tally) -> Iterator[tuple[int, str]]:
    """Yield each line's number and text."""
    digest = hashlib.sha256()
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    with file:
        for number, raw in enumerate(file, 1):
            digest.update(raw)
            tally.bytes += len(raw)
            raw = raw.rstrip(b"\n").removesuffix(b"\r")
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            try:
                yield number, raw.decode("utf-8")
            except UnicodeDecodeError as error:
                if errors == "strict":
                    known = _OTHER_ENCODINGS.get(raw[:2]) if number == 1 else None
                    raise DataError(
                        f"{path}:{number}: not UTF-8{f' but {known}' if known else ''} (byte 0x{raw[error.start]:02X} at column "
                        f"{error.start + 1}); convert the file, or choose --errors skip or replace"
                    ) from error
                if errors == "skip":
                    tally.skipped["not UTF-8"] += 1
                else:
                    tally.replaced += 1
                    yield number, raw.decode("utf-8", "replace")
    tally.hashes.append(digest.hexdigest())


def _stretches(lines: Iterator[str]) -> Iterator[str]:
    """Yield runs of lines between blank ones."""
    gathered: list[str] = []
    for line in lines:
        if line.strip():
            gathered.append(line)
        elif gathered:
            yield "\n".join(gathered)
            gathered = []
    if gathered:
        yield "\n".join(gathered)


def _from_json(path: Path, lines: Iterator[tuple[int, str]], text_key: str, errors: str, tally: Tally) -> Iterator[str]:
    missing = f'no text field "{text_key}"'
    for number, line in lines:
        if not line.strip():
            tally.skipped["empty"] += 1
            continue
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise DataError(f"{path}:{number}: not JSON ({what}); a .json or .jsonl file holds one object a line") from error
        text = record.get(text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            tally.skipped[missing] += 1
        elif not text.strip():
            tally.skipped["empty"] += 1
        elif text.isascii() or not _lone_surrogates(text):
            yield text
        elif errors == "strict":
            raise DataError(
                f"{path}:{number}: half of a \\u surrogate pair in the text; mend it, or choose --errors skip or replace"
            )
        elif errors == "skip":
            tally.skipped["not UTF-8"] += 1
        else:
            tally.replaced += 1
            yield text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _lone_surrogates(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def nothing_read(files: Sequence[str | Path], tally: Tally) -> DataError:
    """Return the error of files without a single document, saying why each line was left out."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(tally.skipped.items()) if count)
    why = f"left out: {reasons}" if reasons else "the file is empty" if len(files) == 1 else "the files are empty"
    return DataError(f"{', '.join(map(str, files))}: no document in it ({why})")
