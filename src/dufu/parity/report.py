"""The report of `dufu check`: a table for the terminal, and Markdown for a pull request."""

from __future__ import annotations

from typing import Any

from dufu.parity.check import Finding, Report
from dufu.parity.comparison import worst

COLUMNS = ("layout", "processes", "losses", "gradient norm", "gradients", "parameters", "units", "bytes sent", "result")


def rows(report: Report) -> list[tuple[str, ...]]:
    """Return the table: of each layout the largest difference of each kind, and the most bytes that a process sent in a step."""
    return [_row(finding) for finding in report.findings]


def _row(finding: Finding) -> tuple[str, ...]:
    head = (finding.layout, str(finding.world))
    comparison = finding.comparison
    if comparison is None:
        return (*head, *("-" for _ in COLUMNS[2:-1]), "failed")
    units = worst([*comparison.forward, *comparison.backward])
    sizes = (
        comparison.losses.size, comparison.norm.size, worst(comparison.gradients).size, worst(comparison.parameters).size, units.size,
    )  # fmt: skip
    sent = max((int(witness["bytes"]) for witness in finding.witnesses), default=0)
    return (*head, *(f"{size:.1e}" for size in sizes), f"{sent:,}", "same" if comparison.agrees else "DIFFERS")


def explanations(report: Report) -> list[str]:
    """Return for each layout that differs or failed where it begins, by how much, and the likely reason."""
    return [text for finding in report.findings if (text := _explanation(finding))]


def _explanation(finding: Finding) -> str:
    if finding.failure:
        return f"{finding.layout}: {finding.failure}"
    comparison = finding.comparison
    if comparison is None or comparison.agrees:
        return ""
    parts = []
    first = comparison.first_unit
    if first is not None:
        unit, direction, difference = first
        what = (
            "whose output" if direction == "forward" else f"the gradient of {difference.name}'s output, which its backward gives,"
        )
        parts.append(f"first unit: {unit}, {what} differs by {difference.size:.1e}")
    parameter = comparison.first_parameter
    if parameter is not None:
        kind = "gradient" if any(d is parameter for d in comparison.gradients) else "value"
        parts.append(f"first parameter: {parameter.name}, whose {kind} differs by {parameter.size:.1e}")
    for name, difference in (("losses", comparison.losses), ("gradient norm", comparison.norm)):
        if difference.counts:
            parts.append(f"{name}: {difference.name} by {difference.size:.1e}")
    parts += comparison.problems[:3]
    return f"{finding.layout}: {'; '.join(parts)}. Likely reason: {finding.reason}"


def as_markdown(report: Report) -> str:
    """Return the whole report."""
    count = sum(finding.agrees for finding in report.findings)
    verdict = "Every layout gives the numbers of one process." if report.agrees else "Not every layout does."
    lines = [
        f"# dufu check {report.subject}",
        "",
        f"{count} of {len(report.findings)} layouts give the numbers of one process over {report.steps} steps. {verdict}",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(row) + " |" for row in rows(report)),
        "",
        "Differences are relative, the largest of each kind; bytes are the most that one process handed to others in the first step.",
    ]
    found = explanations(report)
    if found:
        lines += ["", "## What differs", "", *(f"- {text}" for text in found)]
    lines += ["", "## Tolerances", ""]
    for tolerance in dict.fromkeys(finding.tolerance for finding in report.findings):
        names = ", ".join(finding.layout for finding in report.findings if finding.tolerance == tolerance)
        lines.append(f"- {names}: {tolerance.text()}")
    lines += ["", "## Versions", "", *(f"- {name}: {value}" for name, value in report.facts.items()), ""]
    return "\n".join(lines)


def as_table(report: Report) -> Any:
    """Return the table for rich."""
    from rich.table import Table

    table = Table(
        *COLUMNS, title=f"{report.subject}: {report.steps} steps against {report.facts.get('compared with', 'one process')}"
    )
    for row, finding in zip(rows(report), report.findings):
        table.add_row(*row, style=None if finding.agrees else "bold red")
    return table


__all__ = ["as_markdown", "as_table", "explanations", "rows"]
