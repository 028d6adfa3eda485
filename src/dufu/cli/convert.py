"""`dufu convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[
        str, typer.Argument(help="A checkpoint of another program, a file or a folder; with --from hf a Hugging Face folder.")
    ],
    out: Annotated[
        str | None, typer.Argument(help="What is written: a folder for hf and megatron, otherwise a file. Not with --show-table.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(help="name=value of what the source does not say, such as num_attention_heads=12.")
    ] = None,
    source_format: Annotated[str, typer.Option("--from", help="libai, uer, tencentpretrain, megatron, fairseq or hf.")] = "",
    target_format: Annotated[str, typer.Option("--to", help="The same names.")] = "hf",
    model: Annotated[
        str, typer.Option(help="gpt2, bert, roberta, or a published size such as bert_base; default: as the names tell.")
    ] = "",
    config: Annotated[str | None, typer.Option(help="The program's own settings, JSON or YAML, such as UER-py's config.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer's file or folder that goes into the Hugging Face folder.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the source's.")] = None,
    allow_unexpected: Annotated[
        list[str] | None, typer.Option(help="Names in the source that are left out, * for any text; may be given several times.")
    ] = None,
    exact_norms: Annotated[
        bool, typer.Option(help="UER-py's and TencentPretrain's norms differ; change their weights so that ours computes the same.")
    ] = False,
    max_shard_size: Annotated[str, typer.Option(help="Size of one file of a Hugging Face folder, such as 5GB.")] = "5GB",
    show_table: Annotated[bool, typer.Option("--show-table", help="Print which name is which, and write nothing.")] = False,
) -> None:
    """Turn another program's checkpoint into a Hugging Face folder, which everything here reads, or back."""
    from dufu.errors import ConfigError
    from dufu.interchange.export import dtype_of, size_of
    from dufu.training.convert import Options, convert, parse_given, table_of

    if not source_format:
        raise ConfigError("--from is missing: libai, uer, tencentpretrain, megatron, fairseq or hf")
    texts = list(settings or [])
    if show_table and out is not None:
        texts.insert(0, out)  # there is no OUT, so the first setting stands in its place
    options = Options(model, Path(config) if config else None, parse_given(texts), tuple(allow_unexpected or ()), exact_norms)
    if show_table:
        print(table_of(Path(source), source_format, target_format, options))
        return
    if out is None:
        raise ConfigError("OUT is missing: where the result goes")
    if dtype is not None:
        dtype_of(dtype)
    done = convert(
        Path(source), Path(out), source_format, target_format, options, dtype, Path(tokenizer) if tokenizer else None,
        size_of(max_shard_size),
    )  # fmt: skip
    for note in done.notes:
        print(f"note: {note}")
    print(f"{done.path}  {done.bytes / 1e6:.1f} MB, {done.dtype}, {done.target.rpartition('.')[2]}")


command.verb = "convert"  # type: ignore[attr-defined]
