"""The scripts that show what happens do what they say, and notice when it is not so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def shown(name: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a reader does."""
    env = {k: v for k, v in os.environ.items() if k != "DUFU_ERROR_FILE"} | environment
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], cwd=folder, env=env, capture_output=True, text=True, timeout=400
    )


@pytest.mark.parametrize(
    ("name", "last"),
    [
        (
            "show_killed_rank",
            r"killed at step \d+, begun again from step \d+: all 200 lines .* equal to the last bit, 0 processes left",
        ),
        ("show_stuck", r"stuck after step 3: explained and ended \d+\.\d s later \(timeout 5 s\), exit status 1"),
        ("show_resize", r"8 → 3 → 5 processes against one: 15 steps, 120 samples .* losses within \d\.\de-0[6-9]"),
        ("show_two_hosts", r"two hosts, dp2xtp2, against one process: 10 steps, losses within \d\.\de-0[6-9]|^skipped: "),
    ],
)
def test_a_script_shows_what_it_claims(name: str, last: str, tmp_path: Path) -> None:
    done = shown(name, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(last, done.stdout.splitlines()[-1]), done.stdout[-2000:]
    for namespace in re.findall(r"dufu\d+[ab]", done.stdout):
        assert not Path("/run/netns", namespace).exists()


def test_a_layout_that_computes_something_else_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("from dufu.parallel import faults\nfaults._active.add('tensor.skip_leave')\n")
    done = shown("show_two_hosts", tmp_path, PYTHONPATH=str(tmp_path))
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout)
    assert done.returncode == 1 and re.search(r"^error: losses differ by", done.stderr, re.M), done.stdout[-2000:] + done.stderr


def test_without_the_command_ip_it_is_skipped(tmp_path: Path) -> None:
    done = shown("show_two_hosts", tmp_path, PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "skipped: the command `ip` is not installed\n"), done.stderr


def test_numbers_that_differ_are_noticed() -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from small_run import largest_difference
    finally:
        sys.path.remove(str(EXAMPLES))
    one = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    assert largest_difference(one, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]) == 0.5
    for other in ([], one[:1]):
        with pytest.raises(SystemExit, match="different steps"):
            largest_difference(one, other)
