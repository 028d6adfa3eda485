"""The commands of docs/models.md run, in order, as a reader would type them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small import write_corpus
from tests.test_readme import BLOCK, ROOT


@pytest.mark.skipif(os.environ.get("DUFU_MODELS") != "all", reason="DUFU_MODELS=all; the README's own commands are much the same")
def test_the_commands_run(tmp_path: Path) -> None:
    write_corpus(tmp_path / "my.txt", limit=200)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    found = [text for kind, text in BLOCK.findall((ROOT / "docs/models.md").read_text(encoding="utf-8")) if kind == "sh"]
    assert found
    for text in found:
        subprocess.run(["bash", "-euo", "pipefail", "-c", text], cwd=tmp_path, env=environment, check=True, timeout=600)
    assert (tmp_path / "hf/small/config.json").is_file()
