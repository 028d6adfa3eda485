"""`dufu check`: exit status, table, report, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.small import dufu

TINY = ["model.cfg.hidden_size=32", "model.cfg.ffn_hidden_size=64", "model.cfg.max_seq_length=24"]


def test_layouts_that_agree_end_with_0_and_a_report(tmp_path: Path) -> None:
    done = dufu("check", "gpt2_tiny", *TINY, "--layouts", "dp2,tp2", "--report", str(tmp_path / "new" / "report.md"), "--save-reference",
                str(tmp_path / "reference"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "dp2" in done.stdout and "same" in done.stdout and "DIFFERS" not in done.stdout
    report = (tmp_path / "new" / "report.md").read_text()
    for wanted in (
        "2 of 2 layouts give the numbers of one process",
        "| tp2 | 2 |",
        "- torch: ",
        "- config sha256: ",
        "‖difference‖",
    ):
        assert wanted in report
    other = dufu("check", "gpt2_tiny", *TINY, "train.seed=5", "--layouts", "dp2", "--reference", str(tmp_path / "reference"))
    assert other.returncode == 1 and "DIFFERS" in other.stdout and "first unit: embedding" in other.stdout


def test_a_mistake_ends_with_2_and_one_line() -> None:
    for layouts, said in (
        ("dp2,tp3", "layout tp3: layers.0.block.attention: 4 attention heads"),
        ("dp2,pq2", 'did you mean "pp2"'),
    ):
        done = dufu("check", "gpt2_tiny", "--layouts", layouts)
        assert done.returncode == 2 and said in done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not done.stdout


def test_the_grammar_is_shown() -> None:
    done = dufu("show", "layouts")
    assert done.returncode == 0
    for word in ("dpN", "zeroS(dpN,shardM)", "dualpipev", "all_to_all", "recompute", "what cannot be combined", "cp8(all_to_all)"):
        assert word in done.stdout
    assert dufu("show", "layouts", "a=1").returncode == 2


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


def test_nothing_outlives_the_command() -> None:
    command = [sys.executable, "-m", "dufu.cli.main", "check", "gpt2_tiny", *TINY, "--layouts", "dp2", "--steps", "100000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stderr is not None
    assert "dp2 on 2 processes" in process.stderr.readline()
    workers = children(process.pid)
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < end:
        os.sched_yield()
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
