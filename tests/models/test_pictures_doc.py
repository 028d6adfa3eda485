"""The commands of docs/pictures.md run, as a reader would type them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.pictures import write_shapes
from tests.test_readme import BLOCK, ROOT


@pytest.mark.skipif(os.environ.get("DUFU_MODELS") != "all", reason="DUFU_MODELS=all")
def test_every_command_of_the_page_on_pictures_runs(tmp_path: Path) -> None:
    write_shapes(tmp_path / "shapes", 30)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = 0
    for _, text in BLOCK.findall((ROOT / "docs/pictures.md").read_text(encoding="utf-8")):
        command = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        ran += 1
    assert ran == 4
    fields = json.loads((tmp_path / "output/vit_hf/config.json").read_text())
    assert fields["id2label"] == {"0": "circle", "1": "square", "2": "triangle"}
    assert (tmp_path / "output/vit_hf/preprocessor_config.json").is_file()
