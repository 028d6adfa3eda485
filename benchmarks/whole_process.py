"""Whole commands: time and peak memory as the operating system accounts for them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

DUFU = [sys.executable, "-m", "dufu.cli.main"]

PLAIN_TOKENIZE = """
import sys, numpy as np
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
lines = [line for line in open(sys.argv[2], encoding="utf-8").read().split("\\n") if line]
ids = [e.ids for e in tokenizer.encode_batch(lines, add_special_tokens=False)]
np.concatenate([np.asarray(i, np.uint16) for i in ids]).tofile(sys.argv[3])
"""


def run(command: list[str], cwd: Path) -> tuple[float, float]:
    """Run a command; return its seconds and the peak memory in MiB of the process and its children, summed as they run."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, sum(_resident(pid) for pid in _tree(process.pid)))
        time.sleep(0.01)
    if process.returncode:
        raise RuntimeError(f"{command}: {process.stderr.read().decode()[-2000:] if process.stderr else ''}")
    return time.perf_counter() - began, peak


def _tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(p for child in children for p in _tree(int(child)))]


def _resident(pid: int) -> float:
    """Return the memory that belongs to a process alone, in MiB: pages shared with its parent are not counted again."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def write_text(path: Path, copies: int) -> None:
    """Write Python's help topics `copies` times, one paragraph a line."""
    paragraphs = [" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n") if part.strip()]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(copies):
            file.write("\n".join(paragraphs) + "\n")


def preprocess(rounds: int) -> list[tuple[str, str, str]]:
    """Return rows on preprocessing: memory by file size and by workers, time beside the tokenizers library used plainly."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, large = folder / "small.txt", folder / "large.txt"
        write_text(small, 8)
        write_text(large, 64)
        common = ["--tokenizer", str(folder / "tokenizer" / "tokenizer.json")]
        train = ["preprocess", str(small), "--train-tokenizer", "4000", "--tokenizer-out", str(folder / "tokenizer")]
        run([*DUFU, *train, "--out", str(folder / "first")], folder)
        plain = [sys.executable, "-c", PLAIN_TOKENIZE, str(folder / "tokenizer" / "tokenizer.json")]
        peaks: dict[str, list[float]] = {}
        times: dict[str, list[float]] = {}
        for turn in range(rounds):
            jobs = {
                "small": [*DUFU, "preprocess", str(small), *common, "--out", str(folder / f"s{turn}")],
                "large": [*DUFU, "preprocess", str(large), *common, "--out", str(folder / f"l{turn}")],
                "small, 2 workers": [
                    *DUFU,
                    "preprocess",
                    str(small),
                    *common,
                    "--out",
                    str(folder / f"sw{turn}"),
                    "--workers",
                    "2",
                ],
                "large, 2 workers": [*DUFU, "preprocess", str(large), *common, "--out", str(folder / f"w{turn}"), "--workers", "2"],
                "plain": [*plain, str(large), str(folder / "plain.bin")],
            }
            for key, command in jobs.items():
                seconds, peak = run(command, folder)
                times.setdefault(key, []).append(seconds)
                peaks.setdefault(key, []).append(peak)
        middle = {k: sorted(v)[len(v) // 2] for k, v in times.items()}
        top = {k: sorted(v)[len(v) // 2] for k, v in peaks.items()}
        size = f"{small.stat().st_size >> 20} and {large.stat().st_size >> 20} MiB of text"
        rows.append(
            ("peak memory, 8 × the text / the text", f"{top['large'] / top['small']:.2f}", f"{top['large']:.0f} MiB; {size}")
        )
        rows.append(
            (
                "the same, 2 workers",
                f"{top['large, 2 workers'] / top['small, 2 workers']:.2f}",
                f"{top['large, 2 workers']:.0f} MiB",
            )
        )
        rows.append(
            (
                "peak memory / tokenizers library on the whole file",
                f"{top['large'] / top['plain']:.2f}",
                f"{top['plain']:.0f} MiB plain",
            )
        )
        rows.append(
            ("time / tokenizers library on the whole file", f"{middle['large'] / middle['plain']:.2f}", f"{middle['large']:.1f} s")
        )
    return rows


INDEX = """
import resource, time, sys
from dufu.data.indexed import IndexedTokens
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
source = IndexedTokens(sys.argv[1])
seconds = time.perf_counter() - began
print(len(source), seconds * 1e3, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def startup(rounds: int) -> list[tuple[str, str, str]]:
    """Return rows on what a user waits for before anything happens."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = sorted(run([sys.executable, "-c", "pass"], folder)[0] for _ in range(rounds))[rounds // 2]
        torch = sorted(run([sys.executable, "-c", "import torch"], folder)[0] for _ in range(rounds))[rounds // 2]
        help_page = sorted(run([*DUFU, "--help"], folder)[0] for _ in range(rounds))[rounds // 2]
        rows.append(("dufu --help", f"{help_page / torch:.2f} of import torch", f"{help_page:.2f} s; python alone {python:.2f} s"))
        write_text(folder / "text.txt", 1)
        first = []
        for turn in range(rounds):
            out = folder / f"run{turn}"
            command = [*DUFU, "train", "quickstart", "--data", "text.txt", f"train.output_dir={out}", "train.log_period=1"]
            process = subprocess.Popen([*command, "train.train_iter=1000"], cwd=folder, stdout=subprocess.DEVNULL)
            began = time.perf_counter()
            while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
                time.sleep(0.01)
            first.append(time.perf_counter() - began)
            process.kill()
            process.wait()
        middle = sorted(first)[rounds // 2]
        rows.append(
            (
                "first step of the quickstart's training",
                f"{middle / torch:.2f} of import torch",
                f"{middle:.2f} s after the command",
            )
        )
        rows.append(_index_row(folder))
    return rows


def _index_row(folder: Path) -> tuple[str, str, str]:
    """Open the index of 10^8 sequences (a sparse file: what it holds does not matter for opening)."""
    import struct

    count = 100_000_000
    with (folder / "huge.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, 2))
        file.seek(file.tell() + 12 * count)
        file.write(struct.pack("<qq", 0, count))
    (folder / "huge.bin").touch()
    done = subprocess.run([sys.executable, "-c", INDEX, str(folder / "huge")], capture_output=True, text=True, check=True)
    sequences, milliseconds, grown = (float(x) for x in done.stdout.split())
    return (f"open an index of {sequences:.0e} sequences", f"{milliseconds:.1f} ms", f"memory grows by {grown:.1f} MiB")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    for row in (*preprocess(1), *startup(3)):
        print(row)
