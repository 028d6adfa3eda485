"""What a section, a key or a class takes, for `dufu show`: names, types, defaults and the words of the documentation."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from dufu.config.python_text import expression
from dufu.config.renamed import FILLED_IN
from dufu.config.resolve import resolve
from dufu.config.schema import SECTIONS, section_at
from dufu.config.signature import NO_DEFAULT, signature_of

_FILLED_IN = {path.rpartition(".")[2] for path in FILLED_IN}
_HEADING = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Example|Examples|Note)s?:\s*$")
_ENTRY = re.compile(r"^(\*{0,2}\w+(?:, ?\*{0,2}\w+)*)(?: \([^)]*\))?:\s+(.*)$")


@dataclass(frozen=True)
class Row:
    """One key or argument.

    Args:
        name: its dotted path or name.
        type: as it is written in the source.
        default: as Python text; "" where there is none.
        doc: what it means.
    """

    name: str
    type: str
    default: str
    doc: str


def describe_section(path: str) -> list[Row]:
    """Return every key of a section or of a part of one, such as "train" or "train.amp"; of a single key, that key."""
    found = section_at(path)
    assert found is not None
    cls, key = found
    if not key:
        return _section_rows(cls, path)
    return [row for row in _section_rows(cls, path.rpartition(".")[0]) if row.name == path]


def section_doc(name: str) -> str:
    """Return what a section is about."""
    return {
        "train": "the run: length, batch, layout, precision, checkpoints, evaluation",
        "graph": "compilation",
        "dataloader": "files, splits, and what a sample is",
        "tokenization": "from text to tokens",
        "model": "one recorded call: the network",
        "optim": "one recorded call: the optimizer and its parameter groups",
    }[name]


def is_section(path: str) -> bool:
    """Say whether a dotted path is a section, a part of one or a key of one."""
    return path.split(".")[0] in SECTIONS and section_at(path) is not None


def _section_rows(cls: type, where: str) -> list[Row]:
    hints = get_type_hints(cls)
    rows = []
    for item in fields(cls):
        path, kind = f"{where}.{item.name}", hints[item.name]
        if is_dataclass(kind):
            rows += _section_rows(kind, path)  # type: ignore[arg-type]
            continue
        default = item.default_factory() if callable(item.default_factory) else item.default
        written = item.metadata["kind"] if "kind" in item.metadata else str(item.type)
        if item.metadata.get("nullable"):
            written += " | None"
        rows.append(Row(path, written, expression(default), item.metadata.get("doc", "")))
    return rows


def describe_callable(target: Any) -> tuple[str, list[Row], bool]:
    """Return (summary, arguments, whether it takes others as well) of a callable."""
    target = resolve(target)
    signature, docs = signature_of(target), argument_docs(target)
    rows = []
    for argument in signature.arguments.values():
        default = "" if argument.default is NO_DEFAULT else _default(argument.default)
        doc = docs.get(argument.name, "")
        if argument.name in _FILLED_IN and not default:
            doc = f"{doc} (filled in by dufu)".strip()
        rows.append(Row(argument.name, argument.written, default, doc))
    summary = summary_of(target)
    return summary, rows, signature.open


def summary_of(target: Any) -> str:
    """Return the text of a docstring before its first section."""
    lines = []
    for line in (inspect.getdoc(target) or "").splitlines():
        if _HEADING.match(line):
            break
        lines.append(line)
    return "\n".join(lines).strip()


def argument_docs(target: Any) -> dict[str, str]:
    """Return the documentation of each argument by name: of the class, its `__init__`, then of the classes it derives from.

    An entry `others: those of Name.` stands for the documentation of that class in the same module.
    """
    sources = list(inspect.getmro(target)) if inspect.isclass(target) else [target]
    found: dict[str, str] = {}
    for source in sources:
        texts = [vars(source).get("__doc__")] if inspect.isclass(source) else [source.__doc__]
        if inspect.isclass(source):
            texts.append(getattr(vars(source).get("__init__"), "__doc__", None))
        for text in texts:
            for name, doc in _entries(text or "").items():
                if name not in found or re.match(r"see [A-Z]", found[name]):
                    found[name] = doc
    borrowed = re.match(r"those of `?(\w+)", found.pop("others", ""))
    if borrowed:
        found = {**argument_docs(getattr(sys.modules[target.__module__], borrowed[1])), **found}
    return found


def _entries(text: str) -> dict[str, str]:
    """Return the entries of a docstring's "Args:" section; `a, b: text` documents both."""
    entries: dict[str, str] = {}
    current: list[str] = []
    inside, indent = False, 0
    for line in inspect.cleandoc(text).splitlines():
        heading = _HEADING.match(line)
        if heading:
            inside, indent, current = heading[1].startswith("Arg"), 0, []
            continue
        if not inside or not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = indent or depth
        entry = _ENTRY.match(line.strip()) if depth == indent else None
        if depth == 0:
            inside = False
        elif entry:
            current = [name.strip().lstrip("*") for name in entry[1].split(",")]
            entries.update(dict.fromkeys(current, entry[2]))
        else:
            for name in current:
                entries[name] += " " + line.strip()
    return entries


def _default(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str, list, tuple, Mapping)):
        return expression(list(value) if isinstance(value, tuple) else value)
    return getattr(value, "__qualname__", repr(value))
