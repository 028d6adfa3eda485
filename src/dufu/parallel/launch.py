"""Start N copies of a command on this host through PyTorch's elastic agent, and end as they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path


def launch(arguments: Sequence[str], processes: int, max_restarts: int = 0) -> int:
    """Run `python -m dufu.cli.main ARGUMENTS` in `processes` processes and return the exit status.

    A free port is found each time, so two runs on one host do not meet. The first process that fails for a user's mistake prints its
    line, the others stay silent (see cli.main).

    Returns:
        0; 2 for a user's mistake; 130 or 143 after SIGINT or SIGTERM; otherwise 1.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="dufu-launch-") as folder:
        os.environ["DUFU_ERROR_FILE"] = str(Path(folder) / "error")
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
            shutdown_timeout=600,  # a checkpoint is written before a stopped process ends
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "dufu.cli.main", *arguments)
        except ChildFailedError as error:
            codes = [failure.exitcode for failure in error.failures.values()]
            for code in (2, 143, 130):
                if code in codes:
                    return code
            return 1
        except SignalException as stop:
            return 128 + int(stop.sigval)
        except KeyboardInterrupt:
            return 128 + int(signal.SIGINT)
    return 0
