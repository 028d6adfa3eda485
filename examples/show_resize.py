"""A run that goes on on another number of processes, twice: eight, then three, then five, against one process.

    python examples/show_resize.py

A global batch has eight samples, whatever the layout: three processes take 3, 3 and 2 of them, five take 2, 2, 2, 1 and 1.
"""

from __future__ import annotations

from pathlib import Path

from small_run import DUFU, SMALL, fail, finish, largest_difference, prepare, records, say, seconds, start

FOLDER = Path("output/show_resize")
STEPS, TOLERANCE = 15, 1e-5
ZERO = ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"]
SIZES = ["train.dist.tensor_parallel_size", "train.dist.pipeline_parallel_size"]
# Layout, processes, settings, and the step at which the part ends.
PARTS = [
    ("dp2xtp2xpp2", 8, [f"{key}=2" for key in SIZES], 5),
    ("dp3", 3, [f"{key}=1" for key in SIZES], 10),
    ("zero3(dp5)", 5, [f"{key}=1" for key in SIZES] + ZERO, STEPS),
]


def main() -> None:
    """Run the parts and one process, compare, and print the figures."""
    text = prepare(FOLDER, paragraphs=200)
    common = ["--data", str(text), *SMALL, "model.cfg.max_seq_length=48", f"train.train_iter={STEPS}"]
    run = FOLDER / "resized"
    say("1. One process")
    finish(start([*DUFU, "train", "bert_tiny", *common, f"train.output_dir={FOLDER}/one"]))
    for number, (layout, processes, settings, stop) in enumerate(PARTS):
        say(f"{number + 2}. {processes} processes, {layout}, to step {stop}")
        how = [str(run), "--resume"] if number else ["bert_tiny", *common, f"train.output_dir={run}"]
        finish(start([*DUFU, "train", *how, "--nproc", str(processes), *settings, f"train.stop_at_step={stop}"]))
    one, found = records(FOLDER / "one"), records(run)
    say(f"{len(PARTS) + 2}. Both, step by step")
    print("  step  layout        samples  tokens   loss on one process     resized")
    for a, b in zip(one, found):
        layout = next(name for name, _, _, stop in PARTS if a["step"] <= stop)
        same = "" if (a["samples"], a["tokens"]) == (b["samples"], b["tokens"]) else "   OTHER SAMPLES"
        print(f"  {a['step']:4d}  {layout:12s}  {b['samples']:7d}  {b['tokens']:6d}   {a['loss']:.12f}     {b['loss']:.12f}{same}")
    far = largest_difference(one, found)
    columns = [[(r["samples"], r["tokens"]) for r in each] for each in (one, found)]
    if columns[0] != columns[1] or len(one) != STEPS:
        fail("the resized run took other samples")
    if far >= TOLERANCE:
        fail(f"the losses differ by {far:.1e}")
    say(
        f"8 → 3 → 5 processes against one: {STEPS} steps, {columns[0][-1][0]} samples and {len({t for _, t in columns[0]})} different counts "
        f"of tokens alike, losses within {far:.1e}, {seconds():.0f} s"
    )


if __name__ == "__main__":
    main()
