"""Documents out of raw files: lines, blank-line-separated stretches, or JSON lines; each read as bytes, so that only `\\n` ends a line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dufu.errors import DataError


def is_json_lines(path: str | Path) -> bool:
    """Say whether a file's name marks it as JSON lines."""
    return Path(path).suffix in (".jsonl", ".json", ".ndjson")


def read_documents(
    path: str | Path,
    documents: str = "lines",
    text_key: str = "text",
    errors: str = "strict",
    skipped: Counter[str] | None = None,
) -> Iterator[str]:
    """Yield the documents of a raw file.

    Args:
        path: text, or JSON lines by its suffix. A byte-order mark is dropped, and a carriage return before a line's end.
        documents: "lines" (one a line) or "blank-lines" (a blank line ends one).
        text_key: the field of a JSON line that holds the text.
        errors: what bytes that are not UTF-8 do: "strict" (an error), "skip" the line, "replace" them by U+FFFD.
        skipped: counts what was left out, by reason.

    Raises:
        DataError: the file is missing or not readable as what it should be; the message names file and line.
    """
    skipped = Counter() if skipped is None else skipped
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    as_json = is_json_lines(path)
    gathered: list[str] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            raw = raw.rstrip(b"\n").removesuffix(b"\r")
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            try:
                line = raw.decode("utf-8", "replace" if errors == "replace" else "strict")
            except UnicodeDecodeError as error:
                if errors == "skip":
                    skipped["not UTF-8"] += 1
                    continue
                raise DataError(
                    f"{path}:{number}: not UTF-8 (byte 0x{raw[error.start]:02X} at column {error.start + 1}); "
                    f"convert the file, or choose --errors skip or replace"
                ) from error
            if as_json:
                if not line.strip():
                    skipped["empty"] += 1
                    continue
                text = _text_of(line, text_key, path, number, skipped)
                if text is not None:
                    yield text
            elif documents == "blank-lines":
                if line.strip():
                    gathered.append(line)
                elif gathered:
                    yield "\n".join(gathered)
                    gathered = []
            elif line.strip():
                yield line
            else:
                skipped["empty"] += 1
    if gathered:
        yield "\n".join(gathered)


def _text_of(line: str, text_key: str, path: Path, number: int, skipped: Counter[str]) -> str | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from error
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        skipped[f'no text field "{text_key}"'] += 1
        return None
    if not text.strip():
        skipped["empty"] += 1
        return None
    return text
