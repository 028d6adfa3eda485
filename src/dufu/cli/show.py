"""`dufu show`."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dufu.errors import ConfigError, nearest

if TYPE_CHECKING:
    from dufu.config.describe import Row


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A recipe, a config file or a run's folder; a registered name or dotted path; a section or key; layouts. None lists."
        ),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings of a recipe or config file.")] = None,
    py: Annotated[bool, typer.Option("--py", help="Print a config as Python assignments instead of YAML.")] = False,
    trust: Annotated[list[str] | None, typer.Option(help="A package whose classes configs may name.")] = None,
) -> None:
    """Print an effective config, the arguments of a class, the keys of a section, or a list of all of them."""
    from dufu.config.describe import is_section
    from dufu.config.trusted import trust as trust_package

    for package in trust or []:
        trust_package(package)
    if name is None:
        _only_configs(overrides, py, "without a name")
        print(_everything())
    elif name == "layouts":
        _only_configs(overrides, py, name)
        print(_layouts())
    elif is_section(name):
        _only_configs(overrides, py, name)
        print(_section(name))
    elif name in ("model", "optim"):
        _only_configs(overrides, py, name)
        print(_call_section(name))
    elif _is_config(name):
        print(_config(name, overrides or [], py))
    else:
        _only_configs(overrides, py, name)
        print(_callable(name))


command.verb = "show"  # type: ignore[attr-defined]


def _only_configs(overrides: list[str] | None, py: bool, name: str) -> None:
    if overrides or py:
        given = "--py" if py else (overrides or [""])[0]
        raise ConfigError(f"dufu show {name}: {given} goes with a recipe or a config file")


def _is_config(name: str) -> bool:
    from dufu.config.load import SUFFIXES
    from dufu.training.effective import recipe_names

    return name in recipe_names() or Path(name).suffix in SUFFIXES or Path(name).is_dir()


def _config(name: str, overrides: list[str], py: bool) -> str:
    """Return a checked config as text."""
    from dufu.config.load import LazyConfig
    from dufu.training.batch_size import plan_batch
    from dufu.training.effective import effective_config

    config = effective_config(name, overrides)
    if config.train.dist.data_parallel_size is not None:
        plan_batch(config.train, config.train.dist.data_parallel_size)  # raises where the batch's sizes disagree
    return LazyConfig.to_py(config) if py else LazyConfig.to_yaml(config).rstrip("\n")


def _section(path: str) -> str:
    from dufu.config.describe import describe_section, section_doc

    head = [f"{path}: {section_doc(path)}", ""] if "." not in path else []
    return "\n".join([*head, *_rows(describe_section(path))])


def _call_section(name: str) -> str:
    from dufu.config.describe import section_doc
    from dufu.config.registry import names
    from dufu.config.schema import CALLS

    kind = CALLS[name]
    known = names(kind)
    lines = [f"{name}: {section_doc(name)}; its keys are the arguments of the {kind} that it names:", ""]
    return "\n".join([*lines, *_columns(known.items()), "", f"`dufu show NAME` prints a {kind}'s arguments."])


def _callable(name: str) -> str:
    """Return what a registered name (of whatever kinds) or a dotted path takes."""
    from dufu.config.describe import describe_callable
    from dufu.config.lazy import target_path
    from dufu.config.registry import HOMES, lookup, names
    from dufu.config.resolve import resolve
    from dufu.config.schema import SECTION_NAMES, section_paths
    from dufu.training.effective import recipe_names

    found = {"": resolve(name, "dufu show")} if "." in name and name.split(".")[0] not in SECTION_NAMES else {}
    if not found:
        found = {kind: lookup(name, kind) for kind in HOMES if name in names(kind)}
    if not found:
        known = [*recipe_names(), *SECTION_NAMES, *section_paths(), *(n for kind in HOMES for n in names(kind))]
        raise ConfigError(f'dufu show: nothing is called "{name}"{nearest(name, known)} (`dufu show` lists what there is)')
    blocks = []
    for kind, target in found.items():
        summary, rows, more = describe_callable(target)
        title = f"{kind} {name} = {target_path(target)}" if kind else target_path(target)
        ending = ["", "It takes other arguments as well."] if more else []
        blocks.append("\n".join([title, *([summary] if summary else []), "", *(_rows(rows) or ["no arguments"]), *ending]))
    return "\n\n".join(blocks)


def _layouts() -> str:
    """Return the grammar of layouts as text, and what cannot be combined."""
    from dufu.parallel.layout_text import describe_layouts

    blocks = [[title, *_columns(rows)] for title, rows in describe_layouts().items()]
    return "\n\n".join("\n".join(block) for block in blocks)


def _everything() -> str:
    """Return the list of recipes, sections and registered names."""
    from dufu.config.describe import section_doc
    from dufu.config.load import recipes_folder
    from dufu.config.registry import HOMES, names
    from dufu.config.schema import SECTION_NAMES
    from dufu.training.effective import recipe_names

    lines = ["recipes (dufu train NAME)"]
    lines += _columns((name, _headline(recipes_folder() / f"{name}.py")) for name in recipe_names())
    lines += ["", "sections of a config (dufu show NAME lists the keys)"]
    lines += _columns((name, section_doc(name)) for name in SECTION_NAMES)
    for kind in HOMES:
        known = names(kind)
        if known:
            lines += ["", f"{kind}: registered names (dufu show NAME lists the arguments)"]
            lines += _columns((name, known[name]) for name in sorted(known))
    return "\n".join(lines)


def _headline(path: Path) -> str:
    """Return the first line of a file's docstring without running the file."""
    import ast

    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0] if text else ""


def _width() -> int:
    return max(60, shutil.get_terminal_size((120, 24)).columns)


def _columns(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return names and texts in two columns."""
    items = list(pairs)
    left = max((len(name) for name, _ in items), default=0) + 4
    return [
        line
        for name, text in items
        for line in textwrap.wrap(
            text, _width(), initial_indent=f"  {name}".ljust(left), subsequent_indent=" " * left, break_long_words=False
        )
        or [f"  {name}"]
    ]


def _rows(rows: list[Row]) -> list[str]:
    """Return each key as `name: type = default`, and what it means below."""
    lines = []
    for row in rows:
        kind = f": {row.type}" if row.type else ""
        lines.append(f"{row.name}{kind}{f' = {row.default}' if row.default else ''}")
        lines += textwrap.wrap(row.doc, _width(), initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    return lines
