"""Start N copies of a command on each host, end as they ended, and begin again where that can help."""

from __future__ import annotations

import logging
import mmap
import os
import signal
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dufu.parallel.hosts import Hosts, settle_network
from dufu.parallel.team import Failure, HostLost, Outcome, Team, Verdict, exit_status, judge

# The file by which the processes of one launch agree who says what went wrong: the first to write its number into it.
_SPEAKER = "DUFU_ERROR_FILE"
# The file in which each process of this host keeps the number of its step, where its launcher finds it even after a kill.
_STEPS = "DUFU_STEP_FILE"
_NO_STEP = -1
# A checkpoint is written before a stopped process ends.
_GRACE_SECONDS = 600
# Processes whose peers have failed have nothing to write.
_FAILURE_GRACE_SECONDS = 30
_POLL_SECONDS = 0.1
_STUCK = ".stuck"  # beside the speaker's file
_STUCK_GRACE_SECONDS = 4.0  # in which a process that can still run ends by itself

ALONE = Hosts()


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


class _StepNote:
    """This process's place in the launcher's file of steps: a write costs well under a microsecond."""

    def __init__(self) -> None:
        self._path: str | None = None
        self._memory: mmap.mmap | None = None

    def write(self, step: int) -> None:
        path = os.environ.get(_STEPS)
        if path != self._path:
            self._path, self._memory = path, None
            if path:
                with suppress(OSError, ValueError), open(path, "r+b") as file:
                    self._memory = mmap.mmap(file.fileno(), 0)
        if self._memory is not None:
            struct.pack_into("<q", self._memory, 8 * int(os.environ.get("LOCAL_RANK", "0")), step)


_step_note = _StepNote()


def note_step(step: int) -> None:
    """Tell the launcher, if there is one, which step this process is making (counted from 0)."""
    _step_note.write(step)


def note_stuck() -> None:
    """Tell the launcher, if there is one, that all processes are ending, and that one which does not is to be killed soon."""
    path = os.environ.get(_SPEAKER)
    if path:
        with suppress(OSError):
            Path(path + _STUCK).touch()
            time.sleep(2 * _POLL_SECONDS)  # the launcher looks before it sees the first process end


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


def launch(
    arguments: Sequence[str],
    processes: int,
    max_restarts: int = 0,
    hosts: Hosts = ALONE,
    again: Sequence[str] = (),
) -> int:
    """Run `python -m dufu.cli.main ARGUMENTS` in `processes` processes on this host and return the exit status.

    The launcher keeps the store at which the processes meet; on one host at a port that the system chooses, so two runs do not meet. Of
    processes that fail, the first one of a host says why (see `speak_for_all`).

    Args:
        max_restarts: how often a run that failed begins again; a user's mistake, or a failure at the same step as the last one, ends it.
        hosts: the hosts that take part, with one launcher each.
        again: arguments added for later attempts.

    Returns:
        0; 2 for a user's mistake; 130 or 143 after SIGINT or SIGTERM; otherwise 1. The same on every host.

    Raises:
        LayoutError: the hosts cannot meet, or were given different settings.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    for name in [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each has a level of its own; what matters is said by the processes
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // processes))
    if hosts.count > 1:
        settle_network(hosts.address)
    team = Team(hosts, processes, {"--nproc": processes, "--max-restarts": max_restarts})
    try:
        with tempfile.TemporaryDirectory(prefix="dufu-launch-", ignore_cleanup_errors=True) as folder:
            return _Launch(team, Path(folder), list(arguments), max_restarts, list(again)).run()
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except KeyboardInterrupt:
        return 128 + int(signal.SIGINT)
    finally:
        team.part()


class _Launch:
    """The attempts of one launch on this host.

    Args:
        team: the launchers of all hosts.
        folder: for the files that the processes of an attempt share.
        arguments: of the command.
        max_restarts: attempts beyond the first.
        again: arguments added for later attempts, once the first has begun to write.
    """

    def __init__(self, team: Team, folder: Path, arguments: list[str], max_restarts: int, again: list[str]) -> None:
        self.team, self.folder, self.arguments, self.max_restarts, self.again = team, folder, arguments, max_restarts, again
        self.run_id = uuid.uuid4().hex
        self.processes = team.processes[team.hosts.rank]

    def run(self) -> int:
        """Make attempts until one succeeds or another cannot help; return the exit status."""
        steps: list[int | None] = []
        begun = False
        for attempt in range(self.max_restarts + 1):
            arguments = self.arguments + [a for a in self.again if begun and a not in self.arguments]
            try:
                mine = self._attempt(arguments, attempt)
                outcomes = self.team.exchange(attempt, mine)
            except HostLost as lost:
                print(f"dufu: {lost}; the run ends here", file=sys.stderr, flush=True)
                return 1
            verdict = judge(outcomes, steps, self.max_restarts - attempt)
            self._say(verdict, attempt)
            if not verdict.restart:
                return verdict.status
            steps.append(verdict.step)
            # What failed before its first step has not touched the run's folder, and must not take up an older run in it.
            begun = begun or verdict.step is not None
        return 1

    def _attempt(self, arguments: list[str], attempt: int) -> Outcome:
        """Start the processes and wait until all have ended, here or elsewhere."""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
        from torch.distributed.elastic.multiprocessing.api import SignalException

        steps = self.folder / f"steps_{attempt}"
        steps.write_bytes(struct.pack("<q", _NO_STEP) * self.processes)
        logs = self.folder / f"attempt_{attempt}"
        logs.mkdir()
        context = start_processes(
            name="dufu",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(self.processes), ("-m", "dufu.cli.main", *arguments)),
            envs={number: self._environment(number, attempt) for number in range(self.processes)},
            logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
        )
        try:
            return self._follow(context, attempt, steps)
        except (SignalException, KeyboardInterrupt) as stop:
            number = signal.Signals(int(getattr(stop, "sigval", signal.SIGINT)))
            context.close(number, _GRACE_SECONDS)
            if self.team.hosts.count > 1:
                with suppress(HostLost):
                    stopped = Failure(self.team.first_rank, 128 + int(number), time.time())
                    self.team.exchange(attempt, Outcome([stopped], _last_step(steps)))
            raise
        except BaseException:
            context.close(signal.SIGTERM, _FAILURE_GRACE_SECONDS)
            raise

    def _follow(self, context: Any, attempt: int, steps: Path) -> Outcome:
        look = 0
        while True:
            stuck = (self.folder / f"error_{attempt}{_STUCK}").exists()
            if stuck:
                _kill_the_frozen(context)
            result = context.wait(0)
            if result is not None:
                failures = [Failure(self.team.first_rank + n, f.exitcode, float(f.timestamp)) for n, f in result.failures.items()]
                failures = [f for f in failures if not (stuck and f.code == -signal.SIGKILL)]  # killed here
                return Outcome(sorted(failures, key=lambda f: f.at), _last_step(steps))
            look += 1
            if self.team.hosts.count > 1 and look % 10 == 0 and self.team.trouble(attempt):
                # Most have lost a connection and are ending by themselves; the rest may hang in code that speaks to nobody.
                context.close(signal.SIGTERM, _FAILURE_GRACE_SECONDS)
                return Outcome([], _last_step(steps))
            time.sleep(_POLL_SECONDS)

    def _environment(self, number: int, attempt: int) -> dict[str, str]:
        """Return what a process reads to find its place; the names are torchrun's."""
        team = self.team
        return {
            "RANK": str(team.first_rank + number),
            "WORLD_SIZE": str(team.world_size),
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "GROUP_RANK": str(team.hosts.rank),
            "GROUP_WORLD_SIZE": str(team.hosts.count),
            "MASTER_ADDR": team.address,
            "MASTER_PORT": str(team.port),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            _SPEAKER: str(self.folder / f"error_{attempt}"),
            _STEPS: str(self.folder / f"steps_{attempt}"),
        }

    def _say(self, verdict: Verdict, attempt: int) -> None:
        """Tell the user, on the first host, what the processes could not."""
        if self.team.hosts.rank:
            return
        _report_killed([(f.rank, f.code) for f in verdict.failures])
        if verdict.why:
            number = f" (restart {attempt + 1} of {self.max_restarts})" if verdict.restart else ""
            print(f"dufu: {verdict.why}{number}", file=sys.stderr, flush=True)


def _kill_the_frozen(context: Any) -> None:
    """Let processes that are ending do so, and kill the rest."""
    end = time.monotonic() + _STUCK_GRACE_SECONDS
    while time.monotonic() < end and any(_running(pid) for pid in context.pids().values()):
        time.sleep(_POLL_SECONDS)
    context.close(signal.SIGKILL, 1)


def _running(pid: int) -> bool:
    """Say whether a child has not ended, without taking its status from whoever waits for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _last_step(path: Path) -> int | None:
    """Return the largest step that a process of this host has begun; None before the first."""
    data = path.read_bytes()
    found = max(struct.unpack(f"<{len(data) // 8}q", data))
    return None if found == _NO_STEP else found


def _report_killed(failures: Sequence[tuple[int, int]]) -> None:
    """Name the process that a signal ended without a word of its own, such as one that used too much memory."""
    for rank, code in failures:  # its peers, which only lost their connection, may have ended in the same moment
        if code < 0 and -code not in (signal.SIGINT, signal.SIGTERM):
            hint = " (the system kills so when memory is short)" if -code == signal.SIGKILL else ""
            print(f"process {rank} was ended by {signal.Signals(-code).name}{hint}", file=sys.stderr, flush=True)


__all__ = ["Hosts", "exit_status", "launch", "note_step", "note_stuck", "settle_worker", "speak_for_all"]
