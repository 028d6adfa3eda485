"""Raw text to tokens on disk: `PREFIX.bin`, `PREFIX.idx`, and `PREFIX.json` that says what made them."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dufu.data.corpus import read_documents
from dufu.data.indexed import IndexedWriter, token_type
from dufu.data.tokenizer import TextTokenizer
from dufu.errors import DataError

FORMAT = 1  # raised when the same input and options would give other files
_BATCH_CHARACTERS = 1 << 20


def file_hash(path: str | Path) -> str:
    """Return the sha256 of a file's content."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _old_file_hash(file)


def _old_file_hash(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of about a million characters, so that memory does not grow with the file."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= 4096:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def preprocess(
    files: Sequence[str | Path],
    tokenizer: TextTokenizer,
    prefix: str | Path,
    *,
    documents: str = "lines",
    text_key: str = "text",
    errors: str = "strict",
    append_eod: bool = True,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Tokenise raw files into one pair of token files.

    Args:
        files: text or JSON lines.
        tokenizer: cuts the text.
        prefix: path of the output without suffix.
        documents: "lines" or "blank-lines".
        text_key: field of a JSON line.
        errors: "strict", "skip" or "replace" for bytes that are not UTF-8.
        append_eod: end each document with the end-of-document token.
        workers: tokenising processes; the output does not depend on it.
        progress: called with (documents, tokens) so far.

    Returns:
        What `PREFIX.json` says: inputs and their hashes, options, counts.

    Raises:
        DataError: a file is unreadable, or there is no document in any.
    """
    if not files:
        raise DataError("preprocess: no input files")
    for file in files:
        if not Path(file).is_file():
            raise DataError(f"{file}: no such file")
    skipped: Counter[str] = Counter()
    eod = [tokenizer.eod] if append_eod else []
    counts = {"documents": 0, "tokens": 0}

    def texts() -> Iterator[str]:
        for file in files:
            yield from read_documents(file, documents, text_key, errors, skipped)

    with IndexedWriter(prefix, token_type(tokenizer.vocab_size)) as writer:
        for encoded in _encode(tokenizer, _batches(texts()), workers):
            kept = [ids for ids in encoded if ids]
            skipped["no tokens"] += len(encoded) - len(kept)
            if not kept:
                continue
            lengths = [len(ids) + len(eod) for ids in kept]
            writer.add_documents(np.concatenate([np.asarray(ids + eod) for ids in kept]), lengths, [1] * len(kept))
            counts["documents"] += len(kept)
            counts["tokens"] += sum(lengths)
            if progress:
                progress(counts["documents"], counts["tokens"])
        if not counts["documents"]:
            raise DataError(f"{', '.join(map(str, files))}: no documents (all lines are empty or left out: {dict(skipped)})")
    made = {
        "format": FORMAT,
        "inputs": [{"path": str(f), "sha256": file_hash(f)} for f in files],
        "tokenizer": {
            "source": tokenizer.source,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
        },
        "options": {"documents": documents, "text_key": text_key, "errors": errors, "append_eod": append_eod},
        **counts,
        "skipped": {reason: n for reason, n in skipped.items() if n},
    }
    part = Path(f"{prefix}.json.part{os.getpid()}")
    part.write_text(json.dumps(made, indent=1, ensure_ascii=False), encoding="utf-8")
    os.replace(part, f"{prefix}.json")
    return made


def _encode(tokenizer: TextTokenizer, batches: Iterator[list[str]], workers: int) -> Iterator[list[list[int]]]:
    if workers <= 1:
        for batch in batches:
            yield tokenizer.encode_batch(batch)
        return
    from concurrent.futures import Future, ProcessPoolExecutor
    from multiprocessing import get_context

    text = tokenizer.tokenizer.to_str()
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (text, tokenizer.source)) as pool:
        waiting: list[Future[list[list[int]]]] = [pool.submit(_encode_one, b) for b in islice(batches, 2 * workers)]
        while waiting:
            done = waiting.pop(0).result()
            following = next(batches, None)
            if following is not None:
                waiting.append(pool.submit(_encode_one, following))
            yield done


_worker: TextTokenizer | None = None


def _start_worker(text: str, source: str) -> None:
    global _worker
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = TextTokenizer(Tokenizer.from_str(text), source)


def _encode_one(batch: list[str]) -> list[list[int]]:
    assert _worker is not None
    return _worker.encode_batch(batch)


def cache_key(file: str | Path, tokenizer: TextTokenizer, options: dict[str, Any]) -> str:
    """Return the name under which a raw file's tokens are cached: a hash of its content, the tokenizer and the options."""
    parts = [FORMAT, file_hash(file), tokenizer.fingerprint, json.dumps(options, sort_keys=True), Path(file).suffix]
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:32]


def default_cache() -> Path:
    """Return the user's cache folder for tokens."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dufu" / "tokens"


def tokenised(
    path: str | Path, tokenizer: TextTokenizer, cache: str | Path | None = None, *, make: bool = True, **options: Any
) -> str:
    """Return the prefix of a file's tokens: itself if it is one, otherwise the cached result of preprocessing, made if need be.

    Args:
        path: a prefix of `.bin/.idx`, or a raw file.
        cache: folder; None = the user's.
        make: whether a missing result is made here.
        options: `documents`, `text_key`, `append_eod` of `preprocess`.
    """
    for prefix in (str(path), str(path).removesuffix(".bin"), str(path).removesuffix(".idx")):
        if Path(f"{prefix}.idx").is_file() and Path(f"{prefix}.bin").is_file():
            _check_made_by(prefix, tokenizer)
            return prefix
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file, and no {path}.bin with {path}.idx")
    prefix = str((Path(cache) if cache else default_cache()) / cache_key(path, tokenizer, options) / "tokens")
    if make and not Path(f"{prefix}.json").is_file():
        preprocess([path], tokenizer, prefix, **options)
    return prefix


def _check_made_by(prefix: str, tokenizer: TextTokenizer) -> None:
    """Refuse token files that another tokenizer made, where their JSON says so."""
    note = Path(f"{prefix}.json")
    if note.is_file():
        made = json.loads(note.read_text(encoding="utf-8")).get("tokenizer", {})
        if made.get("fingerprint") not in (None, tokenizer.fingerprint):
            raise DataError(
                f"{prefix}: made with tokenizer {made.get('source')} ({made['fingerprint']}), but the run uses "
                f"{tokenizer.source} ({tokenizer.fingerprint}); set tokenization.tokenizer={made.get('source')}"
            )
