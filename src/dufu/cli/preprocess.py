"""`dufu preprocess`."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    files: Annotated[list[str], typer.Argument(help="Text files (one document a line) or JSON lines.")],
    out: Annotated[str, typer.Option(help="Prefix of the output files.")],
    tokenizer: Annotated[str, typer.Option(help='"bytes", a tokenizer.json, a BERT vocab.txt, or a folder.')] = "bytes",
    workers: Annotated[int, typer.Option(help="Tokenising processes; the output does not depend on it.", min=1)] = 1,
    documents: Annotated[str, typer.Option(help='"lines" or "blank-lines".')] = "lines",
    text_key: Annotated[str, typer.Option(help="Field of a JSON line.")] = "text",
    errors: Annotated[str, typer.Option(help='Bytes that are not UTF-8: "strict", "skip" or "replace".')] = "strict",
    append_eod: Annotated[bool, typer.Option(help="End each document with the end-of-document token.")] = True,
    lower_case: Annotated[bool, typer.Option(help="BERT vocabularies: lower-case and strip accents.")] = True,
) -> None:
    """Turn text into PREFIX.bin, PREFIX.idx and a PREFIX.json that says what made them."""
    from dufu.data.preprocess import preprocess
    from dufu.data.tokenizer import load_tokenizer

    made = preprocess(
        files,
        load_tokenizer(tokenizer, lower_case),
        out,
        documents=documents,
        text_key=text_key,
        errors=errors,
        append_eod=append_eod,
        workers=workers,
    )
    skipped = ", ".join(f"{n} {reason}" for reason, n in made["skipped"].items()) or "none"
    print(f"{out}.bin, {out}.idx: {made['documents']:,} documents, {made['tokens']:,} tokens; left out: {skipped}")


command.verb = "preprocess"  # type: ignore[attr-defined]
