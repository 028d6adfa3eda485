"""The whole path on a laptop: text → tokenizer → tokens → training → resume → two processes → generated text.

Every step is one `dufu` command, printed before it runs, to be copied. The text is Python's own help topics, so nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

FOLDER = Path("output/quickstart")
TEXT, TOKENS, RUN, TWO = FOLDER / "topics.txt", FOLDER / "topics", FOLDER / "run", FOLDER / "run-on-two"
DUFU = [sys.executable, "-m", "dufu.cli.main"]
STEPS, COMPARED = 200, 40


def write_text() -> None:
    """Write Python's help topics, one paragraph a line, in an order that mixes the topics."""
    paragraphs = [" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n")]
    mixed = sorted({p for p in paragraphs if len(p) > 40}, key=lambda p: hash_of(p))
    TEXT.write_text("\n".join(mixed) + "\n", encoding="utf-8")
    print(f"text: {TEXT}, {len(mixed):,} paragraphs, {TEXT.stat().st_size:,} bytes of Python's help topics", flush=True)


def hash_of(text: str) -> int:
    """Return a number that mixes texts and is the same on every run."""
    import zlib

    return zlib.crc32(text.encode())


def dufu(title: str, *arguments: str) -> str:
    """Print a command, run it, and return its output; a failure ends the quickstart."""
    print(f"\n\033[1m{title}\033[0m\n$ dufu {shlex.join(arguments)}", flush=True)
    process = subprocess.Popen([*DUFU, *arguments], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(f"  {line}", end="", flush=True)
        lines.append(line)
    if process.wait():
        sys.exit(f"error: the command above ended with status {process.returncode}")
    return "".join(lines)


def records(run: Path, split: str | None = None) -> list[dict[str, float]]:
    """Return a run's numbers."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r for r in found if r.get("split") == split]


def main() -> None:
    """Run every step and print a summary."""
    began = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    write_text()
    tokenizer = str(FOLDER / "tokenizer")
    dufu(
        "1. Train a byte-level BPE tokenizer and turn the text into tokens",
        "preprocess", str(TEXT), "--train-tokenizer", "2000", "--tokenizer-out", tokenizer, "--out", str(TOKENS),
    )  # fmt: skip
    common = ["quickstart", "--data", str(TOKENS), f"tokenization.tokenizer={tokenizer}", f"train.train_iter={STEPS}"]
    dufu(
        "2. Train a small GPT, with validation and checkpoints; stop before the end",
        "train", *common, f"train.output_dir={RUN}", f"train.stop_at_step={STEPS - 40}",
    )  # fmt: skip
    dufu("3. Resume exactly where it stopped", "train", str(RUN), "--resume", "train.stop_at_step=null")
    dufu(
        f"4. The same training on two processes, for {COMPARED} steps",
        "train", *common, f"train.output_dir={TWO}", "--nproc", "2", f"train.stop_at_step={COMPARED}",
    )  # fmt: skip
    one, two = records(RUN), records(TWO)
    pairs = [(a, b) for a, b in zip(one, two) if a["step"] == b["step"]]
    far = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in pairs)
    print("\n  step  loss on one process     on two")
    for a, b in pairs:
        print(f"  {a['step']:4.0f}  {a['loss']:.12f}     {b['loss']:.12f}")
    print(f"  largest relative difference: {far:.1e} ({'they agree' if far < 1e-5 else 'THEY DIFFER'})")
    if not pairs or far >= 1e-5:
        sys.exit("error: the losses on two processes differ from those on one")
    prompt = "The class statement"
    text = dufu(
        "5. Continue a prompt",
        "generate", str(RUN), "--prompt", prompt, "--max-new-tokens", "40", "--temperature", "0.7", "--top-k", "20", "--seed", "1",
    )  # fmt: skip
    valid = records(RUN, "valid")
    speed = sorted(r["tokens_per_second"] for r in one)[len(one) // 2]
    print(
        f"""
\033[1mSummary\033[0m ({time.monotonic() - began:.0f} s in all)
  training loss     {one[0]["loss"]:.3f} → {one[-1]["loss"]:.3f} in {one[-1]["step"]:.0f} steps
  validation        loss {valid[-1]["loss"]:.3f}, perplexity {valid[-1]["perplexity"]:.1f}, accuracy {valid[-1]["accuracy"]:.3f}
  speed             {speed:,.0f} tokens/s (median)
  one = two         losses differ by at most {far:.1e}, relatively
  sample            {text.strip()[:90]}…
Where everything lies
  {RUN}/config.yaml       the effective config; dufu train {RUN} --resume takes it
  {RUN}/metrics.jsonl     every number; {RUN}/loss.png the curve
  {RUN}/checkpoints/      complete, checksummed, readable into any layout
What to try next
  dufu train gpt2_tiny --data YOUR.txt                         your own text, one document a line
  dufu train gpt2_tiny --data YOUR.txt --nproc 2 train.dist.tensor_parallel_size=2 train.output_dir=output/tp2
  dufu show                                                    recipes, models, settings
  dufu eval {RUN}"""
    )


if __name__ == "__main__":
    main()
