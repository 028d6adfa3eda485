"""`dufu export`: a trained model in a form that other programs open."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(name="export", help="Write a trained model in a form that other programs open.", no_args_is_help=True)


@app.callback()
def _export() -> None:
    """Keep the name of the form a word of its own, however many forms there are."""


@app.command()
def onnx(
    folder: Annotated[str, typer.Argument(help="A run's folder, a checkpoint, or a Hugging Face folder.")],
    out: Annotated[str, typer.Argument(help="Where the graphs go: a new folder, or an empty one.")],
    opset: Annotated[int, typer.Option(help="Version of ONNX's set of operators.")] = 18,
    external_data_above: Annotated[
        int | None, typer.Option(help="Bytes of weights above which they lie in a file beside the graph; default just under 2 GB.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Compare onnxruntime with PyTorch before the folder appears.")] = True,
    tokenizer: Annotated[str | None, typer.Option(help="The tokenizer of a Hugging Face folder that holds none.")] = None,
) -> None:
    """Write ONNX graphs: any batch and length, the cache in and out; compared with PyTorch, and run by dufu generate."""
    from dufu.onnx.export import export_onnx
    from dufu.onnx.write import EXTERNAL_ABOVE

    limit = EXTERNAL_ABOVE if external_data_above is None else external_data_above
    exported = export_onnx(folder, out, opset, limit, check, tokenizer)
    for path in exported.files:
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    trials = sum(each.trials for each in exported.compared)
    worst = max((each.difference for each in exported.compared), default=0.0)
    print(f"onnxruntime equals PyTorch in {trials} calls; largest difference {worst:.1e}" if trials else "not checked")


@app.command()
def peft(
    folder: Annotated[str, typer.Argument(help="The folder, or a checkpoint, of a run that trained adapters.")],
    out: Annotated[str, typer.Argument(help="Where it goes: a new folder, or an empty one.")],
) -> None:
    """Write a run's adapters as a folder that PEFT reads; `dufu export hf` adds them to the weights instead."""
    from dufu.training.peft_folder import export_adapter

    print(export_adapter(folder, out))


@app.command()
def hf(
    folder: Annotated[str, typer.Argument(help="A run's folder, a checkpoint, or a Hugging Face folder.")],
    out: Annotated[str, typer.Argument(help="Where it goes: a new folder, or an empty one.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: a folder's own, float32 for what was trained.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Size of one file, such as 5GB.")] = "5GB",
) -> None:
    """Write a Hugging Face folder that transformers opens as it is, one tensor in memory at a time."""
    from dufu.interchange.export import dtype_of, size_of
    from dufu.training.export_hf import export_folder

    if dtype is not None:
        dtype_of(dtype)
    done = export_folder(folder, out, dtype, size_of(max_shard_size))
    print(f"{done.folder}  {done.bytes / 1e6:.1f} MB, {done.dtype}, after step {done.step}")
    if done.left_out:
        print(f"note: {done.left_out}")
