"""Every command of the READMEs runs, in order, as a reader would type them; the two languages hold the same commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small import write_corpus

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.M | re.S)


def blocks(name: str) -> list[tuple[str, str]]:
    return [(m[1], m[2]) for m in BLOCK.finditer((ROOT / name).read_text(encoding="utf-8"))]


def test_both_languages_hold_the_same_commands() -> None:
    assert blocks("README.md") == blocks("README_zh.md") and len(blocks("README.md")) > 5


@pytest.mark.parametrize("name", sorted(path.stem.removesuffix("_zh") for path in (ROOT / "docs").glob("*_zh.md")))
def test_both_languages_of_a_document_hold_the_same_commands(name: str) -> None:
    assert blocks(f"docs/{name}.md") == blocks(f"docs/{name}_zh.md") and blocks(f"docs/{name}.md")


def test_make_commands_are_run_by_ci() -> None:
    ci = (ROOT / ".ci/run").read_text()
    for target in re.findall(r"^make (\w+)$", "\n".join(text for _, text in blocks("README.md")), re.M):
        assert f"make {target}" in ci


def test_links_lead_somewhere() -> None:
    for name in ("README.md", "README_zh.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / name).read_text(encoding="utf-8")):
            assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"


def test_every_command_runs(tmp_path: Path) -> None:
    write_corpus(tmp_path / "my.txt", limit=400)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = 0
    for language, text in blocks("README.md"):
        if text.startswith("make "):
            continue
        command = ["bash", "-euo", "pipefail", "-c", text] if language == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.fail(f"{text}\nended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        ran += 1
    assert ran > 5
