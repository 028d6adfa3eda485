"""Raw files tokenised once: the result lies in a cache under a name made of the content, the tokenizer and the options."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dufu.data.claim import claim, part_of, release
from dufu.data.corpus import is_json_lines
from dufu.data.indexed import IndexedTokens
from dufu.data.preprocess import FORMAT, preprocess
from dufu.data.sample_map import default_cache
from dufu.data.tokenizer import TextTokenizer
from dufu.errors import DataError


def file_hash(path: str | Path) -> str:
    """Return the sha256 of a file's content."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def cache_key(content: str, path: str | Path, tokenizer: TextTokenizer, options: dict[str, Any]) -> str:
    """Return the name under which a raw file's tokens are cached: a hash of its content, the tokenizer and the options."""
    parts = [FORMAT, content, is_json_lines(path), tokenizer.fingerprint, json.dumps(options, sort_keys=True)]
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:32]


def tokenised(path: str | Path, tokenizer: TextTokenizer, cache: str | Path | None = None, **options: Any) -> str:
    """Return the prefix of a file's tokens: itself if it is one, otherwise the cached result of preprocessing, made if need be.

    Several processes may call this at once: one makes the tokens, the others wait for it.

    Args:
        path: a prefix of `.bin/.idx`, one of these two files, or a raw file.
        cache: folder; None = the user's.
        options: `documents`, `text_key`, `append_eod`, `split_sentences` of `preprocess`.

    Raises:
        DataError: nothing is there, it is unreadable, or another tokenizer made the tokens.
    """
    text = str(path)
    for prefix in (text, text.removesuffix(".bin"), text.removesuffix(".idx")):
        if Path(f"{prefix}.idx").is_file() and Path(f"{prefix}.bin").is_file():
            if prefix == text and Path(path).is_file():
                raise DataError(f"{path}: is a raw file, and also the prefix of {path}.bin; give {path}.bin, or rename one of them")
            _check_made_by(prefix, tokenizer)
            return prefix
    if not Path(path).is_file():
        half = next((s for s in (".bin", ".idx") if Path(f"{path}{s}").is_file()), None)
        raise DataError(f"{path}: no such file, and no {path}.bin with {path}.idx" + (f" (only {path}{half})" if half else ""))
    content = file_hash(path)
    prefix = str((Path(cache) if cache else default_cache()) / "tokens" / cache_key(content, path, tokenizer, options) / "tokens")
    if not _finished(prefix):
        _make(path, tokenizer, prefix, content, options)
    return prefix


def _finished(prefix: str) -> bool:
    return all(Path(f"{prefix}{suffix}").is_file() for suffix in (".json", ".bin", ".idx"))


def _make(path: str | Path, tokenizer: TextTokenizer, prefix: str, content: str, options: dict[str, Any]) -> None:
    """Preprocess into the cache, unless another process does so meanwhile."""
    turn = Path(prefix).with_name("turn")
    lock = claim(turn, wait=True)
    try:
        if _finished(prefix):
            return
        made = preprocess([path], tokenizer, prefix, overwrite=True, **options)
        if made["inputs"][0]["sha256"] != content:
            Path(f"{prefix}.idx").unlink()
            raise DataError(f"{path}: changed while it was read; start again when it is complete")
    finally:
        part_of(turn).unlink(missing_ok=True)
        release(lock)


def _check_made_by(prefix: str, tokenizer: TextTokenizer) -> None:
    """Refuse token files that another tokenizer made, where their JSON says so."""
    made = IndexedTokens(prefix).note.get("tokenizer", {})
    if made.get("fingerprint") not in (None, tokenizer.fingerprint):
        raise DataError(
            f"{prefix}: made with tokenizer {made.get('source')} ({made['fingerprint']}), but the run uses "
            f"{tokenizer.source} ({tokenizer.fingerprint}); set tokenization.tokenizer={made.get('source')}"
        )
