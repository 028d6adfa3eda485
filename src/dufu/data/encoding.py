"""Texts to arrays of tokens, here or in worker processes: in order, whatever the number of workers, a bounded number of batches at a time."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait

import numpy as np
import numpy.typing as npt

from dufu.data.sentences import split_sentences
from dufu.data.tokenizer import TextTokenizer
from dufu.errors import DataError

_CHARACTERS, _TEXTS = 1 << 18, 4096  # of a batch, at most (a longer text is a batch of its own)


@dataclass(frozen=True)
class Encoded:
    """Some documents as tokens.

    Args:
        tokens: flat.
        lengths: of each sequence.
        sequences: of each document.
        empty: texts that gave no token, and are no document.
    """

    tokens: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]
    empty: int


class Encoder:
    """Turns texts into documents of one or several sequences.

    Args:
        tokenizer: cuts the text.
        append_eod: end each document with the end-of-document token.
        sentences: whether each sentence becomes a sequence.
    """

    def __init__(self, tokenizer: TextTokenizer, append_eod: bool, sentences: bool) -> None:
        self.tokenizer, self.sentences = tokenizer, sentences
        self.end = [tokenizer.eod] if append_eod else []

    def __call__(self, texts: list[str]) -> Encoded:
        """Encode a batch of texts."""
        parts = [split_sentences(text) for text in texts] if self.sentences else [[text] for text in texts]
        encoded = iter(self.tokenizer.encode_batch([part for text in parts for part in text]))
        tokens: list[npt.NDArray[np.int64]] = []
        lengths: list[int] = []
        sequences: list[int] = []
        for text in parts:
            kept = [ids for ids in islice(encoded, len(text)) if ids]
            if kept:
                kept[-1] = kept[-1] + self.end
                tokens += [np.array(ids, np.int64) for ids in kept]
                lengths += map(len, kept)
                sequences.append(len(kept))
        flat = np.concatenate(tokens) if tokens else np.zeros(0, np.int64)
        return Encoded(flat, np.array(lengths, np.int64), np.array(sequences, np.int64), len(texts) - len(sequences))


def encode(encoder: Encoder, texts: Iterable[str], workers: int) -> Generator[Encoded, None, None]:
    """Yield the texts' tokens, batch by batch, in order.

    Args:
        encoder: what to do.
        texts: read no further ahead than the workers need.
        workers: processes; 1 = this one, with the tokenizer library's own threads.

    Raises:
        DataError: a worker process has died.
    """
    batches = _batches(iter(texts))
    if workers == 1:
        yield from map(encoder, batches)
        return
    facts = (encoder.tokenizer.tokenizer.to_str(), encoder.tokenizer.source, encoder.end, encoder.sentences)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, facts)
    try:
        waiting: deque[Future[Encoded]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_encode, batch))
            if len(waiting) > workers + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a tokenising process has died (killed, or out of memory); try fewer --workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _CHARACTERS or len(batch) >= _TEXTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


_worker: Encoder | None = None


def _start(tokenizer: str, source: str, end: list[int], sentences: bool) -> None:
    """Make this process a worker."""
    global _worker
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent answers it
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker = Encoder(TextTokenizer(Tokenizer.from_str(tokenizer), source), False, sentences)
    _worker.end = end


def _leave_with_parent() -> None:
    """End this process when its parent is gone: the pool's own queue would keep it waiting for ever."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _encode(batch: list[str]) -> Encoded:
    assert _worker is not None
    return _worker(batch)
