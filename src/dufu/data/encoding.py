"""Texts to arrays of tokens, here or in worker processes: in order, whatever the number of workers, a bounded number of batches at a time."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

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
        texts: read one batch a worker ahead.
        workers: processes; 1 = this one, with the tokenizer library's own threads.

    Raises:
        DataError: a worker process has died.
    """
    batches = _batches(iter(texts))
    if workers == 1:
        yield from map(encoder, batches)
        return
    with _Workers(encoder, workers) as team:
        number = -1
        for number, batch in enumerate(batches):
            if number >= workers:
                yield team.receive(number)
            team.send(number, batch)
        for later in range(max(0, number + 1 - workers), number + 1):
            yield team.receive(later)


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


class _Workers:
    """Processes that encode batches: batch number n goes to worker n mod size, which holds one at a time.

    A plain pipe each, and nothing shared: a worker that dies is noticed at once and holds nobody up, and workers whose parent dies read the
    end of their pipe and leave.
    """

    def __init__(self, encoder: Encoder, size: int) -> None:
        self._encoder, self._size = encoder, size
        self._team: list[tuple[SpawnProcess, Connection]] = []

    def __enter__(self) -> _Workers:
        context = get_context("spawn")
        tokenizer = self._encoder.tokenizer
        facts = (tokenizer.tokenizer.to_str(), tokenizer.source, self._encoder.end, self._encoder.sentences)
        for _ in range(self._size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, *facts), daemon=True)
            process.start()
            theirs.close()
            self._team.append((process, mine))
        return self

    def __exit__(self, *error: object) -> None:
        for process, pipe in self._team:
            pipe.close()
            process.terminate()
        for process, _ in self._team:
            process.join()

    def send(self, number: int, batch: list[str]) -> None:
        """Give a batch to its worker, which must be idle: both would otherwise wait for the other to read."""
        try:
            self._team[number % self._size][1].send(batch)
        except OSError as error:
            raise self._dead(number) from error

    def receive(self, number: int) -> Encoded:
        """Return a batch's tokens."""
        try:
            answer = self._team[number % self._size][1].recv()
        except (EOFError, OSError) as error:
            raise self._dead(number) from error
        if isinstance(answer, Exception):
            raise answer
        encoded: Encoded = answer
        return encoded

    def _dead(self, number: int) -> DataError:
        process = self._team[number % self._size][0]
        process.join(1)
        return DataError(
            f"a tokenising process has died with exit code {process.exitcode} (killed, or out of memory?); try fewer --workers"
        )


def _serve(pipe: Connection, tokenizer: str, source: str, end: list[int], sentences: bool) -> None:
    """Encode the batches that arrive, until the pipe's other end is closed."""
    from tokenizers import Tokenizer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent answers it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = Encoder(TextTokenizer(Tokenizer.from_str(tokenizer), source), False, sentences)
    encoder.end = end
    while True:
        try:
            batch = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: Encoded | Exception = encoder(batch)
        except Exception as error:
            answer = error
        pipe.send(answer)
