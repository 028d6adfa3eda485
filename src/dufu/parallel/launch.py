"""Start N copies of a command on this host through PyTorch's elastic agent, and end as they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

# The file by which the processes of one launch agree who says what went wrong: the first to write its number into it.
_SPEAKER = "DUFU_ERROR_FILE"
# A checkpoint is written before a stopped process ends.
_GRACE_SECONDS = 600


def speak_for_all() -> bool:
    """Say whether this process is the one that reports an error: the first of its launch that fails, or any without a launcher."""
    path = os.environ.get(_SPEAKER)
    if not path:
        return True
    mine = str(os.getpid())
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return Path(path).read_text(encoding="ascii") == mine
    except OSError:
        return True  # the launcher and its folder are gone
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(mine)
    return True


def settle_worker() -> None:
    """Prepare a launched process: it ends at once on an interrupt that comes before training, and soon after its launcher dies."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    # Python's own handling would wait for a blocked collective to return.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_outlive_no_launcher, args=(os.getppid(),), name="dufu-watch", daemon=True).start()


def _outlive_no_launcher(launcher: int) -> None:
    """End this process when its launcher was killed, as a signal would: with a checkpoint if it is training."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


def exit_status(codes: Sequence[int]) -> int:
    """Return the launcher's exit status from those of the processes that failed, the first one first.

    A negative code is that of a process ended by a signal.
    """
    if 2 in codes:
        return 2
    first = codes[0] if codes else 0
    return {0: 0, 130: 130, 143: 143, -int(signal.SIGINT): 130, -int(signal.SIGTERM): 143}.get(first, 1)


def launch(arguments: Sequence[str], processes: int, max_restarts: int = 0) -> int:
    """Run `python -m dufu.cli.main ARGUMENTS` in `processes` processes and return the exit status.

    A free port is found each time, so two runs on one host do not meet. Of processes that fail, the first one says why (see
    `speak_for_all`).

    Returns:
        0; 2 for a user's mistake; 130 or 143 after SIGINT or SIGTERM; otherwise 1.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each has a level of its own; what matters is said by the processes
    with tempfile.TemporaryDirectory(prefix="dufu-launch-", ignore_cleanup_errors=True) as folder:
        os.environ[_SPEAKER] = str(Path(folder) / "error")
        os.environ.setdefault("PYTHONUNBUFFERED", "1")
        if "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            os.environ["OMP_NUM_THREADS"] = str(max(1, cores // processes))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=max_restarts,
            monitor_interval=0.1,
            shutdown_timeout=_GRACE_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "dufu.cli.main", *arguments)
        except ChildFailedError as error:
            failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
            _report_killed([(rank, failure.exitcode) for rank, failure in failures])
            return exit_status([failure.exitcode for _, failure in failures])
        except SignalException as stop:
            return 128 + int(stop.sigval)
        except KeyboardInterrupt:
            return 128 + int(signal.SIGINT)
    return 0


def _report_killed(failures: Sequence[tuple[int, int]]) -> None:
    """Name the process that a signal ended without a word of its own, such as one that used too much memory."""
    for rank, code in failures:  # its peers, which only lost their connection, may have ended in the same moment
        if code < 0 and -code not in (signal.SIGINT, signal.SIGTERM):
            hint = " (the system kills so when memory is short)" if -code == signal.SIGKILL else ""
            print(f"process {rank} was ended by {signal.Signals(-code).name}{hint}", file=sys.stderr, flush=True)
