"""One process stops working while the others wait for it: the run ends soon, and one message says who is where.

    python examples/show_stuck.py

The config names a hook (`train.hooks`) that lets process 1 sleep after the third step. A collective may take five seconds here
(`train.dist.timeout`, otherwise half an hour).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from dufu.distributed import rank
from dufu.training.hooks import Hook
from dufu.training.loop import Trainer

FOLDER = Path("output/show_stuck")
TIMEOUT, STEP = 5, 3


class FallsAsleep(Hook):
    """Lets process 1 sleep after a step.

    Args:
        step: after which.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: Trainer) -> None:
        """See Hook."""
        if trainer.step == self.step:
            (FOLDER / f"reached_{rank()}").write_text(f"{os.getpid()} {time.time()}")
            if rank() == 1:
                time.sleep(600)


def main() -> None:
    """Start the run and print what it says."""
    from small_run import DUFU, SMALL, alive, fail, prepare, say, start

    text = prepare(FOLDER)
    own = f"train.hooks={{_target_: show_stuck.FallsAsleep, step: {STEP}}}"
    command = ["train", "gpt2_tiny", "--data", str(text), "--nproc", "2", *SMALL, "train.train_iter=1000", "--trust", "show_stuck"]
    command += [own, f"train.dist.timeout={TIMEOUT}s", f"train.output_dir={FOLDER}/run"]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    say(f"1. Two processes train; after step {STEP} process 1 sleeps for ten minutes")
    process = start([*DUFU, *command], PYTHONPATH=path)
    _, err = process.communicate(timeout=240)
    ended = time.time()
    marks = [FOLDER / "reached_0", FOLDER / "reached_1"]
    if not all(mark.exists() for mark in marks):
        fail(f"step {STEP} was not reached:\n{err}")
    workers, reached = zip(*(mark.read_text().split() for mark in marks))
    took = ended - max(map(float, reached))
    say("2. What the run says on standard error")
    for line in err.splitlines():
        say(f"   | {line}")
    explained = [
        "stuck: " in err,
        "process 0 waits in " in err,
        "process 1 is elsewhere" in err and "in after_step" in err,
        process.returncode == 1,
        not any(alive(int(pid)) for pid in workers),
        took < TIMEOUT + 30,
    ]
    if not all(explained):
        fail(f"exit status {process.returncode} after {took:.1f} s, and not explained as it should be: {explained}")
    say(f"stuck after step {STEP}: explained and ended {took:.1f} s later (timeout {TIMEOUT} s), exit status {process.returncode}")


if __name__ == "__main__":
    main()
