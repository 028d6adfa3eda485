"""`dufu preprocess`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dufu.data.corpus import Tally


def command(
    files: Annotated[list[str], typer.Argument(help="Text files (one document a line) or JSON lines (.jsonl, .json).")],
    out: Annotated[str, typer.Option(help="Prefix of the output files.")],
    tokenizer: Annotated[
        str | None, typer.Option(help='"bytes" (the default), a tokenizer.json, a BERT vocab.txt, or a folder.')
    ] = None,
    train_tokenizer: Annotated[
        int | None,
        typer.Option(help="Learn a byte-level BPE of this many tokens from the files, and use it.", metavar="VOCAB_SIZE"),
    ] = None,
    tokenizer_out: Annotated[
        str | None, typer.Option(help="Folder of the learnt tokenizer; PREFIX.tokenizer unless given.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Tokenising processes; the output does not depend on it.")] = 1,
    documents: Annotated[str, typer.Option(help='What separates documents of text: "lines" or "blank-lines".')] = "lines",
    text_key: Annotated[str, typer.Option(help="Field of a JSON line.")] = "text",
    errors: Annotated[str, typer.Option(help='Bytes that are not UTF-8: "strict", "skip" or "replace".')] = "strict",
    append_eod: Annotated[bool, typer.Option(help="End each document with the end-of-document token.")] = True,
    split_sentences: Annotated[
        bool, typer.Option("--split-sentences", help="Make each sentence a sequence of its document (English and Chinese).")
    ] = False,
    lower_case: Annotated[bool, typer.Option(help="BERT vocabularies: lower-case and strip accents.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace output that is there.")] = False,
) -> None:
    """Turn text into PREFIX.bin, PREFIX.idx and a PREFIX.json that says what made them."""
    from dufu.data.preprocess import check_request, learn_tokenizer, preprocess
    from dufu.data.tokenizer import load_tokenizer
    from dufu.errors import ConfigError

    if train_tokenizer is not None and tokenizer is not None:
        raise ConfigError(f"--tokenizer {tokenizer} and --train-tokenizer {train_tokenizer}: give one of them")
    if tokenizer_out is not None and train_tokenizer is None:
        raise ConfigError(f"--tokenizer-out {tokenizer_out}: only together with --train-tokenizer")
    reading: dict[str, Any] = {"documents": documents, "text_key": text_key, "errors": errors, "overwrite": overwrite}
    with _ended_by_sigterm():
        check_request(files, out, workers, overwrite, passes=1 if train_tokenizer is None else 2)
        if train_tokenizer is not None:
            folder = tokenizer_out or f"{out}.tokenizer"
            chosen = learn_tokenizer(files, train_tokenizer, folder, **reading)
            print(f"{folder}: {chosen.vocab_size:,} tokens")
        else:
            chosen = load_tokenizer(tokenizer or "bytes", lower_case)
        with _progress(sum(Path(f).stat().st_size for f in files)) as progress:
            made = preprocess(
                files,
                chosen,
                out,
                append_eod=append_eod,
                split_sentences=split_sentences,
                workers=workers,
                progress=progress,
                **reading,
            )
    left_out = ", ".join(f"{n:,} {reason}" for reason, n in made["skipped"].items()) or "none"
    replaced = f"; lines with bytes replaced: {made['replaced']:,}" if made["replaced"] else ""
    sequences = f", {made['sequences']:,} sentences" if split_sentences else ""
    print(
        f"{out}.bin, {out}.idx: {made['documents']:,} documents{sequences}, {made['tokens']:,} tokens; left out: {left_out}{replaced}"
    )


@contextmanager
def _progress(size: int) -> Iterator[Callable[[Tally, int, int], None] | None]:
    """Show how much has been read, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[made]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=size, made="")

        def show(tally: Tally, documents: int, tokens: int) -> None:
            bar.update(task, completed=tally.bytes, made=f"{documents:,} documents, {tokens:,} tokens")

        yield show


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command in order, so that unfinished files are removed; the exit status is 143."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


command.verb = "preprocess"  # type: ignore[attr-defined]
