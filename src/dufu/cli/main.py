"""`dufu`: the entry point. Verbs import what they need when they run, so that `dufu --help` never imports torch."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from traceback import print_exc

import typer

from dufu.cli import check, convert, evaluate, export, generate, preprocess, show, train
from dufu.errors import DufuError
from dufu.parallel.launch import settle_worker, speak_for_all

app = typer.Typer(
    name="dufu",
    help="Train, evaluate and run transformer models: any layout, the same numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (train.command, check.command, evaluate.command, generate.command, preprocess.command, convert.command, show.command):
    app.command(name=getattr(verb, "verb", verb.__name__))(verb)
app.add_typer(export.app)

# Typer carries its own copy of click, whose base of all usage errors it does not export by name.
_UsageError: type[Exception] = next(k for k in typer.BadParameter.__mro__ if k.__name__ == "ClickException")  # type: ignore[assignment]
_OVERRIDE = re.compile(r"^[+~]{0,2}[A-Za-z_][\w.-]*=")


def spread(arguments: Sequence[str], options: Sequence[str] = ("--data",)) -> list[str]:
    """Repeat an option for each path that follows it: `--data a b` becomes `--data a --data b`."""
    out: list[str] = []
    current = ""
    for argument in arguments:
        if argument in options:
            current = argument
            continue
        if current and not argument.startswith("-") and (not _OVERRIDE.match(argument) or os.path.exists(argument)):
            out += [current, argument]
            continue
        current = ""
        out.append(argument)
    return out


def fail(message: str) -> int:
    """Print one line that begins `error:` and return exit status 2; of several processes started together, one prints."""
    if speak_for_all():
        print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return 2


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status: 0 done, 2 the user's mistake, 130 or 143 after a signal, 1 anything else."""
    traceback = "--traceback" in arguments
    arguments = spread([a for a in arguments if a != "--traceback"])
    try:
        result = app(args=list(arguments), standalone_mode=False)
        return int(result) if isinstance(result, int) else 0
    except typer.Abort:
        return 128 + int(signal.SIGINT)
    except typer.Exit as stop:
        return stop.exit_code
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return 0
        return fail(str(getattr(error, "message", error)))
    except DufuError as error:
        if traceback and speak_for_all():
            print_exc()
        return fail(str(error))
    except KeyboardInterrupt:
        return 128 + int(signal.SIGINT)
    except Exception:
        if speak_for_all():
            print_exc()  # the others only lose their connection to this process, and stay silent
        return 1


def main() -> None:
    """Run the command line of this process."""
    # PyTorch's threads wait for each other by spinning; where another program has the other core, that made a step several times
    # slower. On an idle machine a short spin costs a few percent at most. Read when PyTorch is first imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    settle_worker()
    status = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        # All is written and the groups are left. What PyTorch's threads do while an interpreter ends has aborted finished processes.
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
