"""`dufu train`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def command(
    config: Annotated[str, typer.Argument(help="A shipped recipe's name, a .py or .yaml file, or a run's folder with --resume.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings; the last of a key wins.")] = None,
    nproc: Annotated[int, typer.Option(help="Processes to start on this host.", min=1)] = 1,
    data: Annotated[list[str] | None, typer.Option(help="Raw text, JSON lines, or prefixes of .bin/.idx pairs.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    eval_only: Annotated[bool, typer.Option("--eval-only", help="Evaluate the newest checkpoint.")] = False,
    fast_dev_run: Annotated[bool, typer.Option("--fast-dev-run", help="20 steps, evaluation every 10.")] = False,
    allow_change: Annotated[list[str] | None, typer.Option(help="With --resume: a key that may differ.")] = None,
    trust: Annotated[list[str] | None, typer.Option(help="A package whose classes configs may name.")] = None,
) -> int:
    """Train a model, on one process or several, and write checkpoints, metrics and a log into its folder."""
    from dufu.config.instantiate import trust as trust_package

    for package in trust or []:
        trust_package(package)
    if nproc > 1 and "RANK" not in os.environ:
        from dufu.parallel.launch import launch
        from dufu.parallel.layout import layout_from_config
        from dufu.training.run import call_config

        layout_from_config(call_config(config, overrides or [], data or [], fast_dev_run).train, nproc)
        return launch(sys.argv[1:], nproc)
    from dufu.training.run import train

    outcome = train(
        config,
        overrides or [],
        data=data or [],
        resume=resume,
        eval_only=eval_only,
        fast_dev_run=fast_dev_run,
        allow_change=allow_change or [],
    )
    return 128 + outcome.signal if outcome.signal else 0


command.verb = "train"  # type: ignore[attr-defined]
