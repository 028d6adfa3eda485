"""`dufu check`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

DEFAULT = "dp2,tp2,pp2,dp2xtp2,zero3"


def command(
    config: Annotated[str, typer.Argument(help="A shipped recipe's name, a .py or .yaml file, or a run's folder.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings; the last of a key wins.")] = None,
    layouts: Annotated[
        str, typer.Option(help="Layouts, separated by commas, such as dp2,tp2xpp2; `dufu show layouts` prints the grammar.")
    ] = DEFAULT,
    data: Annotated[list[str] | None, typer.Option(help="Files to take samples from; none = made-up text.")] = None,
    steps: Annotated[int, typer.Option(help="Updates to compare.")] = 3,
    report: Annotated[Path | None, typer.Option(help="Write the report (Markdown) to this file.")] = None,
    save_reference: Annotated[Path | None, typer.Option(help="Write what one process computes to this folder.")] = None,
    reference: Annotated[Path | None, typer.Option(help="Compare with a recording instead of one process's run.")] = None,
    trust: Annotated[list[str] | None, typer.Option(help="A package whose classes configs may name.")] = None,
) -> int:
    """Compare layouts with one process: losses, gradients, parameters, every unit. Exit status 1 when one differs."""
    from rich.console import Console

    from dufu.parity.check import check_config
    from dufu.parity.report import as_markdown, as_table, explanations

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    found = check_config(
        config,
        overrides or [],
        layouts=layouts,
        data=data or [],
        steps=steps,
        save_reference=save_reference,
        reference=reference,
        trust=trust or [],
        say=say,
    )
    wide = None if sys.stdout.isatty() else 160
    Console(width=wide).print(as_table(found))
    for text in explanations(found):
        print(text)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(as_markdown(found), encoding="utf-8")
        print(f"report: {report}")
    return 0 if found.agrees else 1


command.verb = "check"  # type: ignore[attr-defined]
