"""Raw text to tokens on disk: `PREFIX.bin`, `PREFIX.idx`, and `PREFIX.json` that says what made them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dufu.data.claim import disk_errors
from dufu.data.corpus import Tally, nothing_read, read_documents
from dufu.data.encoding import Encoder, encode
from dufu.data.indexed import token_type
from dufu.data.indexed_writer import IndexedWriter
from dufu.data.tokenizer import TextTokenizer, train_tokenizer
from dufu.errors import ConfigError, DataError

FORMAT = 2  # raised when the same input and options would give other files
Progress = Callable[[Tally, int, int], None]


def preprocess(
    files: Sequence[str | Path],
    tokenizer: TextTokenizer,
    prefix: str | Path,
    *,
    documents: str = "lines",
    text_key: str = "text",
    errors: str = "strict",
    append_eod: bool = True,
    split_sentences: bool = False,
    workers: int = 1,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Tokenise raw files into one pair of token files, in memory that grows neither with the files nor with the workers' speed.

    Args:
        files: text or JSON lines.
        tokenizer: cuts the text.
        prefix: path of the output without suffix.
        documents: "lines" or "blank-lines".
        text_key: field of a JSON line.
        errors: "strict", "skip" or "replace" for bytes that are not UTF-8.
        append_eod: end each document with the end-of-document token.
        split_sentences: make each sentence a sequence of its document.
        workers: tokenising processes; the output does not depend on it.
        overwrite: replace files that are there.
        progress: called with what was read, and the documents and tokens so far.

    Returns:
        What `PREFIX.json` says: inputs and their hashes, options, counts.

    Raises:
        DataError: a file is unreadable, there is no document in any, or the output exists or cannot be written.
        ConfigError: an option is out of range.
    """
    check_request(files, prefix, workers, overwrite)
    tally = Tally()
    made = 0

    def texts() -> Iterator[str]:
        for file in files:
            yield from read_documents(file, documents, text_key, errors, tally)

    batches = encode(Encoder(tokenizer, append_eod, split_sentences), texts(), workers)
    with IndexedWriter(prefix, token_type(tokenizer.vocab_size)) as writer, closing(batches):
        for encoded in batches:
            tally.skipped["no token"] += encoded.empty
            writer.add_documents(encoded.tokens, encoded.lengths, encoded.sequences)
            made += len(encoded.sequences)
            if progress:
                progress(tally, made, writer.tokens)
        if not made:
            raise nothing_read(files, tally)
        options = {"documents": documents, "text_key": text_key, "errors": errors, "append_eod": append_eod}
        note = {
            "format": FORMAT,
            "inputs": [{"path": str(f), "sha256": sha256} for f, sha256 in zip(files, tally.hashes)],
            "tokenizer": {
                "source": tokenizer.source,
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
            },
            "options": {**options, "split_sentences": split_sentences},
            "documents": made,
            "sequences": writer.sequences,
            "tokens": writer.tokens,
            "skipped": {reason: n for reason, n in sorted(tally.skipped.items()) if n},
            "replaced": tally.replaced,
        }
        writer.complete(note)
    return note


def check_request(files: Sequence[str | Path], prefix: str | Path, workers: int, overwrite: bool, passes: int = 1) -> None:
    """Refuse, before any work, what could not end well.

    Args:
        files, prefix, workers, overwrite: of `preprocess`.
        passes: how often each file will be read; a pipe can be read once.

    Raises:
        DataError: an input is missing, or output lies there already. ConfigError: `workers` is out of range.
    """
    if workers < 1:
        raise ConfigError(f"--workers {workers}: at least 1")
    if not files:
        raise DataError("preprocess: no input files")
    outputs = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx", ".json")]
    for file in map(Path, files):
        if not file.exists():
            raise DataError(f"{file}: no such file")
        if file.is_dir():
            raise DataError(f"{file}: is a folder; name the files in it")
        if passes > 1 and not file.is_file():
            raise DataError(f"{file}: is no regular file, but is read {passes} times; write its content into one")
        for output in outputs:
            if output.exists() and output.samefile(file):
                raise DataError(f"{file}: is an input, and would be written over as an output; choose another --out")
    there = [str(o) for o in outputs if o.exists()]
    if there and not overwrite:
        raise DataError(f"{', '.join(there)}: exists already; choose another --out, or replace it with --overwrite")


def learn_tokenizer(
    files: Sequence[str | Path],
    vocab_size: int,
    folder: str | Path,
    *,
    documents: str = "lines",
    text_key: str = "text",
    errors: str = "strict",
    overwrite: bool = False,
) -> TextTokenizer:
    """Train a byte-level BPE tokenizer on raw files, and keep it in a folder.

    Args:
        files, documents, text_key, errors: as in `preprocess`.
        vocab_size: most tokens.
        folder: where `tokenizer.json` goes; complete or not at all.
        overwrite: replace one that is there.

    Raises:
        DataError: a file is unreadable, or the folder exists already. ConfigError: `vocab_size` is too small.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").exists() and not overwrite:
        raise DataError(f"{folder}: holds a tokenizer already; choose another --tokenizer-out, or replace it with --overwrite")
    tally = Tally()
    count = 0

    def texts() -> Iterator[str]:
        nonlocal count
        for file in files:
            for text in read_documents(file, documents, text_key, errors, tally):
                count += 1
                yield text

    tokenizer = train_tokenizer(texts(), vocab_size, str(folder))
    if not count:
        raise nothing_read(files, tally)
    part = folder.with_name(f"{folder.name}.part")
    try:
        with disk_errors(folder):
            shutil.rmtree(part, ignore_errors=True)
            tokenizer.save(part)
            folder.mkdir(parents=True, exist_ok=True)
            for file in sorted(part.iterdir()):
                os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return tokenizer
