"""The rule that import-linter cannot state: which rooms may speak to other processes."""

from __future__ import annotations

import ast
from pathlib import Path

import dufu

HOME = Path(dufu.__file__).parent


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_models_layers_data_and_optimizers_know_nothing_of_ranks() -> None:
    files = [p for room in ("layers", "models", "data", "optim", "config") for p in (HOME / room).rglob("*.py")]
    assert len(files) > 20
    guilty = {str(p): n for p in files for n in imported(p) if n.startswith("torch.distributed") or n == "torch.dist"}
    assert not guilty
