"""A process is killed in the midst of a run: the run begins again from its newest checkpoint and ends as if nothing had happened.

    python examples/show_killed_rank.py

Two runs of the same config on two processes. In the second one a process, chosen by chance, gets SIGKILL at a step chosen by chance.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

from small_run import DUFU, SMALL, alive, children, fail, finish, prepare, records, say, seconds, start, without_times

FOLDER = Path("output/show_killed_rank")
STEPS, PERIOD = 200, 20


def main() -> None:
    """Run both, compare, and print the figures."""
    text = prepare(FOLDER)
    common = ["train", "gpt2_tiny", "--data", str(text), "--nproc", "2", *SMALL, f"train.train_iter={STEPS}"]
    common += [f"train.checkpointer.period={PERIOD}"]
    say("1. The run that nobody disturbs")
    finish(start([*DUFU, *common, f"train.output_dir={FOLDER}/calm"]))

    say("2. The same run, with --max-restarts 1")
    run, chosen_step = FOLDER / "killed", random.randrange(2 * PERIOD, STEPS // 2)
    process = start([*DUFU, *common, "--max-restarts", "1", f"train.output_dir={run}"])
    workers: list[int] = []
    try:
        while len(records(run)) < chosen_step:
            if process.poll() is not None:
                fail(f"the run ended by itself: {process.communicate()}")
            time.sleep(0.02)
        workers = children(process.pid)
        victim = random.choice(workers)
        os.kill(victim, signal.SIGKILL)
        say(f"   step {len(records(run))}: SIGKILL to process {victim}, one of {workers}")
        while process.poll() is None and not (set(children(process.pid)) - set(workers)):
            time.sleep(0.05)
        workers += [pid for pid in children(process.pid) if pid not in workers]
        _, err = process.communicate(timeout=300)
    finally:
        for pid in [process.pid, *workers]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
    for line in err.splitlines():
        if line.startswith(("process ", "dufu: ")):  # the rest is the traceback of the process that lost its neighbour
            say(f"   | {line}")
    again = re.search(r"resumed at step (\d+)", (run / "log.txt").read_text())
    left = [pid for pid in workers if alive(pid)]
    calm, found = without_times(records(FOLDER / "calm")), without_times(records(run))
    say("3. What came of it")
    say(f"   exit status {process.returncode}; begun again from step {again[1] if again else '?'}; processes left: {len(left)}")
    say(f"   last step, undisturbed: {calm[-1]}")
    say(f"   last step, killed:      {found[-1] if found else 'none'}")
    if process.returncode or again is None or left or len(calm) != STEPS or calm != found:
        fail("the run that lost a process did not end like the one that nobody disturbed")
    say(
        f"killed at step {chosen_step}, begun again from step {again[1]}: all {STEPS} lines of metrics.jsonl are equal to the last bit, "
        f"0 processes left, {seconds():.0f} s"
    )


if __name__ == "__main__":
    main()
