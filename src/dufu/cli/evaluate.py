"""`dufu eval`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def command(
    folder: Annotated[str, typer.Argument(help="A run's folder, a checkpoint, or a Hugging Face folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value settings, such as train.dist.tensor_parallel_size=2.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="Files to evaluate on, whole; default: the run's own split.")] = None,
    split: Annotated[str, typer.Option(help='Without --data: "valid", "test" or "train".')] = "valid",
    nproc: Annotated[int, typer.Option(help="Processes to start on this host.", min=1)] = 1,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trust: Annotated[list[str] | None, typer.Option(help="A package whose classes configs may name.")] = None,
) -> int:
    """Measure a trained model on data: each sample once, the same numbers for any batch size and layout."""
    from dufu.config.trusted import trust as trust_package
    from dufu.errors import ConfigError, nearest

    for package in trust or []:
        trust_package(package)
    if split not in ("train", "valid", "test"):
        raise ConfigError(f'--split {split}: one of "train", "valid", "test"{nearest(split, ("train", "valid", "test"))}')
    if nproc > 1 and "RANK" not in os.environ:
        from dufu.parallel.launch import launch
        from dufu.training.checkpoint import find_weights

        find_weights(folder)
        return launch(sys.argv[1:], nproc)
    import json

    from dufu.parallel.process import leave
    from dufu.training.data import build_dataset
    from dufu.training.evaluation import evaluate
    from dufu.training.load import load
    from dufu.training.metrics import build_metrics

    loaded = load(folder, overrides or [])
    if data:
        loaded.config.dataloader.valid_data = list(data)
    dataset = build_dataset(loaded.config, loaded.tokenizer, "valid" if data else split, loaded.processes)
    settings, micro = loaded.config.train.evaluation, loaded.config.train.test_micro_batch_size
    limit, metrics = int(settings.eval_iter) * micro, build_metrics(settings.evaluator)
    found = evaluate(loaded.distributed, dataset, micro, loaded.precision, limit, metrics)
    if loaded.processes.is_main:
        record = {"step": loaded.step, "split": "data" if data else split, "samples": min(limit, len(dataset)), **found}
        print(
            json.dumps(record)
            if json_lines
            else "  ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items())
        )
    leave()
    return 0


command.verb = "eval"  # type: ignore[attr-defined]
