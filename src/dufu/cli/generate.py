"""`dufu generate`."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer


def command(
    folder: Annotated[
        str, typer.Argument(help="A run's folder, a checkpoint, a Hugging Face folder, or one that dufu export onnx wrote.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value settings, such as train.dist.tensor_parallel_size=2.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A text to continue; may be given several times.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="A file of prompts, one a line.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Most new tokens; default 64 or what fits.")] = None,
    min_new_tokens: Annotated[int, typer.Option(help="No end before this many new tokens.")] = 0,
    max_length: Annotated[int | None, typer.Option(help="Most tokens, prompt and text together.")] = None,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest; 0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest of this total probability.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens that occurred become less likely.")] = 1.0,
    end_token: Annotated[
        list[int] | None, typer.Option(help="Number of a token that ends a text; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    cache: Annotated[bool, typer.Option(help="Keep keys and values of earlier tokens.")] = True,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded together on one process.", min=1)] = 16,
    nproc: Annotated[int, typer.Option(help="Processes to start on this host.", min=1)] = 1,
    json_lines: Annotated[bool, typer.Option("--json", help="Print JSON lines with prompt, text and tokens.")] = False,
    trust: Annotated[list[str] | None, typer.Option(help="A package whose classes configs may name.")] = None,
) -> int:
    """Continue prompts with a trained model, in any layout."""
    from dufu.config.trusted import trust as trust_package
    from dufu.errors import ConfigError

    for package in trust or []:
        trust_package(package)
    prompts = [*(prompt or []), *(_lines(prompt_file) if prompt_file else [])]
    if not prompts:
        raise ConfigError("no prompt; give --prompt TEXT or --prompt-file FILE")
    if nproc > 1 and "RANK" not in os.environ:
        from dufu.onnx import holds_graphs
        from dufu.parallel.launch import launch
        from dufu.training.checkpoint import find_weights

        if holds_graphs(folder):
            raise ConfigError(f"--nproc {nproc}: an ONNX graph runs in one process; leave --nproc out")
        find_weights(folder)
        return launch(sys.argv[1:], nproc)
    from dufu.generation.pipeline import TextGenerationPipeline
    from dufu.parallel.process import leave

    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens, "max_length": max_length, "temperature": temperature,
        "top_k": top_k, "top_p": top_p, "repetition_penalty": repetition_penalty, "end_tokens": tuple(end_token or ()), "seed": seed,
        "use_cache": cache,
    }  # fmt: skip
    pipeline = TextGenerationPipeline(folder, overrides or [], batch_size)
    main = pipeline.loaded.processes.is_main
    live = main and len(prompts) == 1 and not json_lines and sys.stdout.isatty()
    if live and not pipeline.answers:
        print(prompts[0], end="", flush=True)
    results = pipeline(prompts, on_text=(lambda piece: print(piece, end="", flush=True)) if live else None, **settings)
    if main:
        _print(results, json_lines, live)
    leave()
    return 0


def _lines(path: str) -> list[str]:
    from dufu.data.corpus import read_documents

    return list(read_documents(path))


def _print(results: list[Any], json_lines: bool, live: bool) -> None:
    import json

    if live:
        print()
        return
    for result in results:
        if json_lines:
            print(json.dumps({"prompt": result.prompt, "text": result.text, "tokens": result.tokens}, ensure_ascii=False))
        else:
            print(result.whole)


command.verb = "generate"  # type: ignore[attr-defined]
