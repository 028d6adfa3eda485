"""`make bench`: the tables, as ratios of medians over interleaved rounds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import checkpoint_speed, dufu_gpt, folder_speed, plain_gpt, whole_process
from benchmarks.harness import Contender, machine, measure, ratio

# 38 million parameters: 3 layers, 768 wide, 4 heads, the Chinese BERT vocabulary's size, head tied.
GPT38 = {"vocab": 21128, "width": 768, "layers": 3, "heads": 4, "length": 128, "dropout": 0.1}
ZERO3 = ("train.zero_optimization.enabled=true", "train.zero_optimization.stage=3")


def table(title: str, rows: list[tuple[str, str, str]]) -> None:
    """Print rows of (what, figure, comment)."""
    print(f"\n### {title}\n\n| what | ratio | median (least–most) |\n|---|---|---|")
    for what, figure, comment in rows:
        print(f"| {what} | {figure} | {comment} |")


def train(rounds: int) -> None:
    """Time a step beside the plain loop, and with PyTorch's dropout in the place of ours."""
    contenders = [
        Contender("plain", plain_gpt.build, (GPT38, 16, True)),
        Contender("plain, memory kept", plain_gpt.build, (GPT38, 16, True, "", True)),
        Contender("dufu", dufu_gpt.build, (GPT38, 16, True)),
        Contender("dufu, PyTorch's dropout", dufu_gpt.build, (GPT38, 16, True, (), True)),
        Contender("plain, no dropout", plain_gpt.build, ({**GPT38, "dropout": 0.0}, 16, True)),
        Contender("dufu, no dropout", dufu_gpt.build, ({**GPT38, "dropout": 0.0}, 16, True)),
    ]
    found = measure(contenders, rounds)
    times = {name: f"{r.median:.3f} s ({r.least:.3f}–{r.most:.3f})" for name, r in found.items()}
    table(
        "A step of the 38 M GPT, micro-batch 16 × 128, bf16 O1, 2 threads",
        [
            ("dufu / plain loop", f"{ratio(found, 'dufu', 'plain'):.3f}", f"{times['dufu']} against {times['plain']}"),
            (
                "dufu / plain loop with memory kept",
                f"{ratio(found, 'dufu', 'plain, memory kept'):.3f}",
                times["plain, memory kept"],
            ),
            (
                "dufu / plain loop, no dropout",
                f"{ratio(found, 'dufu, no dropout', 'plain, no dropout'):.3f}",
                f"{times['dufu, no dropout']} against {times['plain, no dropout']}",
            ),
            (
                "layout-free dropout / PyTorch's",
                f"{ratio(found, 'dufu', 'dufu, PyTorch' + chr(39) + 's dropout'):.3f}",
                times["dufu, PyTorch's dropout"],
            ),
        ],
    )


def scale(rounds: int) -> None:
    """Time two processes of one thread against one process of two threads, 2,048 tokens a process and step."""
    one = Contender("one process, 2 threads", dufu_gpt.build, (GPT38, 16, True), work=2048)
    two = [
        Contender("data parallel", dufu_gpt.build, (GPT38, 16, True), 2, 1, 4096),
        Contender("tensor parallel", dufu_gpt.build, (GPT38, 16, True, ("train.dist.tensor_parallel_size=2",)), 2, 1, 2048),
        Contender("ZeRO-3", dufu_gpt.build, (GPT38, 16, True, ZERO3), 2, 1, 4096),
    ]
    peers = [
        Contender("PyTorch DDP, plain loop", plain_gpt.build, (GPT38, 16, True, "ddp"), 2, 1, 4096),
        Contender("PyTorch FSDP2, plain loop", plain_gpt.build, (GPT38, 16, True, "fsdp2"), 2, 1, 4096),
    ]
    found = measure([one, *two, *peers], rounds)
    rows = []
    for contender in (*two, *peers):
        speed = contender.work / one.work / ratio(found, contender.name, one.name)
        r = found[contender.name]
        rows.append((contender.name, f"{speed:.3f}", f"{r.median:.3f} s ({r.least:.3f}–{r.most:.3f}) a step"))
    table("Tokens a second of 2 processes × 1 thread, over 1 process × 2 threads", rows)


def layouts(rounds: int) -> None:
    """Time each dimension on two processes of one thread against one process of two threads that does the same work a step."""
    long = {**GPT38, "length": 2048}
    pp2, eight = ("train.dist.pipeline_parallel_size=2",), 8
    pairs = [
        # name, what one process does, what two do, and the best that the schedule allows
        ("data parallel, 8 micro-batches", (GPT38, 4, True, (), False, 16), (GPT38, 4, True, (), False, eight), 1.0),
        ("tensor parallel", (GPT38, 16, True), (GPT38, 16, True, ("train.dist.tensor_parallel_size=2",)), 1.0),
        ("ZeRO-3, 2,048 tokens a step", (GPT38, 16, True), (GPT38, 8, True, ZERO3), 1.0),
        ("pipeline, 1F1B, 8 micro-batches", (GPT38, 4, True, (), False, eight), (GPT38, 4, True, pp2, False, eight), 8 / 9),
        ("context parallel, length 2,048", (long, 1, True), (long, 1, True, ("train.dist.context_parallel_size=2",)), 1.0),
    ]  # fmt: skip
    rows = []
    for name, one, two, bound in pairs:
        contenders = [
            Contender("one", dufu_gpt.build, one, 1, 2),
            Contender("half", dufu_gpt.build, one, 1, 1),
            Contender("two", dufu_gpt.build, two, 2, 1),
        ]
        found = measure(contenders, rounds, steps=1)
        speed = 1 / ratio(found, "two", "one")
        threads = 1 / ratio(found, "half", "one")
        r = found["two"]
        comment = f"{speed / bound:.3f} of the bound {bound:.3f}; {speed / threads:.2f} × one process of one thread; "
        rows.append((name, f"{speed:.3f}", comment + f"{r.median:.3f} s ({r.least:.3f}–{r.most:.3f}) a step"))
    table("The same step on 2 processes × 1 thread, speed over 1 process × 2 threads", rows)


def checkpoint(rounds: int) -> None:
    """Time saving and loading beside the disk."""
    table("A checkpoint of the 38 M GPT with AdamW's moments, one process", checkpoint_speed.measure(GPT38, rounds))


def folder(rounds: int) -> None:
    """Time loading a Hugging Face folder beside the disk."""
    table("Loading a sharded Hugging Face folder, cold cache", folder_speed.measure_folder(rounds))


def preprocess(rounds: int) -> None:
    """Memory and time of `dufu preprocess`."""
    table("Preprocessing (byte-level BPE of 4,000 words)", whole_process.preprocess(max(1, rounds // 3)))


def startup(rounds: int) -> None:
    """Time before anything happens."""
    table("Start", whole_process.startup(max(3, rounds // 2)))


TABLES = {
    "train": train,
    "scale": scale,
    "layouts": layouts,
    "checkpoint": checkpoint,
    "folder": folder,
    "preprocess": preprocess,
    "startup": startup,
}


def main() -> None:
    """Run the chosen tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(machine())
    for name in arguments.tables:
        TABLES[name](arguments.rounds)


if __name__ == "__main__":
    main()
