"""The map of samples: made once for its content, opened at once whatever its size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dufu.data.sample_map import open_map
from dufu.errors import DataError

ROWS = np.arange(12, dtype=np.int64).reshape(6, 2)


class Maker:
    """Counts how often the map is made."""

    calls = 0

    def __call__(self) -> Iterator[np.ndarray]:
        self.calls += 1
        yield ROWS[:4]
        yield ROWS[4:]


def maps(folder: Path) -> list[Path]:
    return sorted((folder / "samples").iterdir())


def test_a_map_is_made_once_and_again_for_anything_else(tmp_path: Path) -> None:
    make = Maker()
    for _ in range(3):
        assert open_map(["a", 1], 2, make, tmp_path).tolist() == ROWS.tolist()
    assert make.calls == 1
    open_map(["a", 2], 2, make, tmp_path)
    assert make.calls == 2 and len(maps(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["cut", "longer", "other", "empty"])
def test_a_damaged_map_is_made_anew(tmp_path: Path, damage: str) -> None:
    make = Maker()
    open_map("x", 2, make, tmp_path)
    path = maps(tmp_path)[0]
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-8], "longer": content + b"1", "other": b"x" * 8 + content[8:], "empty": b""}[damage])
    assert open_map("x", 2, make, tmp_path).tolist() == ROWS.tolist()
    assert make.calls == 2


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> Iterator[np.ndarray]:
        yield ROWS
        raise DataError("no")

    with pytest.raises(DataError):
        open_map("x", 2, fail, tmp_path)
    assert maps(tmp_path) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file where a folder should be")
    with pytest.raises(DataError, match="cannot be written"):
        open_map("x", 2, Maker(), tmp_path)


def test_processes_at_the_same_time_make_one_map(tmp_path: Path) -> None:
    code = f"""
import time, numpy as np
from dufu.data.sample_map import open_map
def make():
    print("made")
    for i in range(20):
        yield np.full((1000, 2), i)
        time.sleep(0.01)
assert open_map("x", 2, make, {str(tmp_path)!r}).shape == (20000, 2)
"""
    workers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    printed = [w.communicate(timeout=60)[0] for w in workers]
    assert [w.returncode for w in workers] == [0] * 4
    assert sum(p.count("made") for p in printed) == 1
    assert len(maps(tmp_path)) == 1


def test_a_hundred_million_samples_open_at_once_in_flat_memory(tmp_path: Path) -> None:
    """A hole of 1.6 GB stands for the rows; the header is the real one."""
    open_map("x", 2, Maker(), tmp_path)
    path = maps(tmp_path)[0]
    rows = 100_000_000
    with path.open("r+b") as file:
        file.seek(8)
        file.write(rows.to_bytes(8, "little"))
        file.truncate(64 + 16 * rows)
    code = f"""
import time
from dufu.data.sample_map import open_map
def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
before, times = peak(), []
for _ in range(5):
    start = time.perf_counter()
    rows = open_map("x", 2, None, {str(tmp_path)!r})
    assert len(rows) == {rows} and rows[{rows} - 1].tolist() == [0, 0]
    times.append(time.perf_counter() - start)
print(min(times), peak() - before)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert float(out[0]) < 0.05, f"{out[0]} s"
    assert int(out[1]) < 8 * 1024, f"{out[1]} KiB more"
