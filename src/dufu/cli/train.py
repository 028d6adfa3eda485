"""`dufu train`."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer


def command(
    config: Annotated[
        str | None, typer.Argument(help="A shipped recipe's name, a .py or .yaml file, or a run's folder with --resume.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings; the last of a key wins.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes to start on this host; default 1.", min=1)] = None,
    nnodes: Annotated[int | None, typer.Option(help="Hosts that take part, with a call of dufu on each; default 1.", min=1)] = None,
    node_rank: Annotated[int | None, typer.Option(help="This host's number, from 0.", min=0)] = None,
    master: Annotated[
        str | None, typer.Option(help="Where host 0 listens, as the others reach it.", metavar="ADDRESS:PORT")
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(help="Begin again from the newest checkpoint after a crash, so many times; default 0.", min=0)
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="Raw text, JSON lines, or prefixes of .bin/.idx pairs.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    eval_only: Annotated[bool, typer.Option("--eval-only", help="Evaluate the newest checkpoint.")] = False,
    fast_dev_run: Annotated[bool, typer.Option("--fast-dev-run", help="20 steps, evaluation every 10.")] = False,
    allow_change: Annotated[list[str] | None, typer.Option(help="With --resume: a key that may differ.")] = None,
    allow_missing: Annotated[
        list[str] | None, typer.Option(help="A pattern of weights that train.load_weight may lack, such as a new head's.")
    ] = None,
    allow_unexpected: Annotated[
        list[str] | None, typer.Option(help="A pattern of weights of train.load_weight that the model may have no place for.")
    ] = None,
    replay: Annotated[
        str | None, typer.Option(help="Make the step of a RUN/nonfinite/step_N again and say where it stops being finite.")
    ] = None,
    trust: Annotated[list[str] | None, typer.Option(help="A package whose classes configs may name.")] = None,
) -> int:
    """Train a model, on one process or several, on one host or several, and write checkpoints, metrics and a log into its folder."""
    from dufu.config.instantiate import trust as trust_package
    from dufu.errors import ConfigError

    for package in trust or []:
        trust_package(package)
    for key, patterns in (("allow_missing", allow_missing), ("allow_unexpected", allow_unexpected)):
        if patterns:
            overrides = [*(overrides or []), f"train.{key}={json.dumps(patterns)}"]
    if replay is not None:
        return _replay(replay, [config] if config else [], nproc, nnodes)
    if config is None:
        raise ConfigError(
            "dufu train: give a recipe's name, a .py or .yaml file, or a run's folder (`dufu show` lists the recipes)"
        )
    started = _launched(config, overrides or [], nproc, nnodes, node_rank, master, max_restarts, data or [], fast_dev_run)
    if started is not None:
        return started
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


def _launched(
    config: str,
    overrides: list[str],
    nproc: int | None,
    nnodes: int | None,
    node_rank: int | None,
    master: str | None,
    max_restarts: int | None,
    data: list[str],
    fast_dev_run: bool,
) -> int | None:
    """Start the processes and return their exit status; None where this process itself is to train."""
    from dufu.parallel.hosts import Start, is_worker, start_of_call

    start = start_of_call(nproc, nnodes, node_rank, master)
    if start is None and not is_worker() and max_restarts:
        start = Start(1)
    if start is None:
        return None
    from dufu.parallel.launch import launch
    from dufu.parallel.layout import layout_from_config
    from dufu.training.run import call_config

    layout_from_config(call_config(config, overrides, data, fast_dev_run).train, start.processes * start.hosts.count)
    restarts = int(os.environ.get("PET_MAX_RESTARTS", 0)) if max_restarts is None else max_restarts
    return launch(sys.argv[1:], start.processes, restarts, start.hosts, again=["--resume"])


def _replay(folder: str, config: list[str], nproc: int | None, nnodes: int | None) -> int:
    """Make a saved step again, in this process."""
    from dufu.errors import ConfigError

    if config or (nproc or 1) > 1 or (nnodes or 1) > 1:
        raise ConfigError(f"--replay {folder}: one process makes the step again, from the folder alone; give nothing else")
    from dufu.training.replay import replay

    print(replay(folder))
    return 0
