"""The launchers of a run, one a host: they meet at the first one's store, learn of each other's failures and judge them alike."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from dufu.errors import LayoutError
from dufu.parallel.hosts import Hosts

_BEAT_SECONDS = 1.0
_SILENCE_SECONDS = 30.0  # after which a host counts as gone
_MEETING_SECONDS = 900.0  # how long the first hosts of a run wait for the last


@dataclass(frozen=True)
class Failure:
    """A process that did not end with status 0.

    Args:
        rank: its global rank.
        code: exit status; negative for a process that a signal ended.
        at: seconds since 1970.
    """

    rank: int
    code: int
    at: float


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended on one host.

    Args:
        failures: in order of time; empty where all processes finished.
        step: the step that the processes were making; None before the first.
    """

    failures: list[Failure] = field(default_factory=list)
    step: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What follows from an attempt, the same on every host.

    Args:
        status: exit status of the launchers, should they end.
        restart: whether all begin again.
        why: a line for the user, or "".
        failures: of all hosts, in order of time.
        step: the step at which the attempt ended.
    """

    status: int
    restart: bool
    why: str
    failures: list[Failure]
    step: int | None


def exit_status(codes: Sequence[int]) -> int:
    """Return the launcher's exit status from those of the processes that failed, the first one first.

    A negative code is that of a process ended by a signal.
    """
    if 2 in codes:
        return 2
    first = codes[0] if codes else 0
    return {0: 0, 130: 130, 143: 143, -2: 130, -15: 143}.get(first, 1)


def judge(outcomes: Sequence[Outcome], earlier: Sequence[int | None], restarts_left: int) -> Verdict:
    """Say whether to begin again. What cannot succeed is not tried: a user's mistake, and what fails twice at the same step.

    Args:
        outcomes: every host's.
        earlier: the steps at which earlier attempts ended; None for one that made no step.
        restarts_left: attempts that the user still allows.
    """
    failures = sorted((f for outcome in outcomes for f in outcome.failures), key=lambda f: f.at)
    steps = [outcome.step for outcome in outcomes if outcome.step is not None]
    step = max(steps, default=None)
    status = exit_status([f.code for f in failures])
    place = "before its first step" if step is None else f"at step {step + 1}"
    if status != 1:
        return Verdict(status, False, "", failures, step)
    if restarts_left and earlier and earlier[-1] == step:
        return Verdict(status, False, f"the run failed twice {place}; another attempt would fail too", failures, step)
    if restarts_left:
        return Verdict(status, True, f"the run failed {place}; it begins again from its newest checkpoint", failures, step)
    tried = f"the run failed {place}, after {len(earlier)} restarts" if earlier else ""
    return Verdict(status, False, tried, failures, step)


class HostLost(Exception):
    """A host's launcher does not answer any more."""


class Team:
    """This launcher among those of the other hosts, and the store at which they and all processes meet.

    Args:
        hosts: who takes part.
        processes: to start on this host.
        agreed: settings that must be the same on every host, by the names the user knows.

    Raises:
        LayoutError: the port is taken, the first host does not answer, or settings differ.
    """

    def __init__(self, hosts: Hosts, processes: int, agreed: dict[str, Any]) -> None:
        self.hosts = hosts
        self._store = self._meet()
        self.address, self.port = hosts.address, int(self._store.port)
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._stop = threading.Event()
        self.processes = [processes]
        if hosts.count > 1:
            try:
                self.processes = self._check_in(processes, agreed)
            except LayoutError:
                self.part()  # the other hosts are still reading what this one has found
                raise
            threading.Thread(target=self._beat, args=(self._store.clone(),), name="dufu-beat", daemon=True).start()

    def _meet(self) -> Any:
        from torch.distributed import DistError, TCPStore

        hosts, patience = self.hosts, timedelta(seconds=_MEETING_SECONDS)
        try:
            return TCPStore(
                hosts.address, hosts.port, is_master=hosts.rank == 0, wait_for_workers=False, timeout=patience, multi_tenant=False
            )
        except DistError as error:
            if hosts.rank == 0:
                raise LayoutError(
                    f"port {hosts.port} of this host cannot be used ({str(error).splitlines()[0]}); choose another one, such as "
                    f"--master {hosts.address}:{_free_port()}, on every host"
                ) from error
            raise LayoutError(
                f"host {hosts.rank}: no launcher answers at {hosts.address}:{hosts.port}; start the one with --node-rank 0 there, "
                f"and let this host reach it"
            ) from error

    def _check_in(self, processes: int, agreed: dict[str, Any]) -> list[int]:
        """Return the number of processes of each host, after all have come with the same settings."""
        key = "dufu/host/"
        mine = json.dumps({"processes": processes, "agreed": agreed, "hosts": self.hosts.count})
        if self._store.compare_set(f"{key}{self.hosts.rank}", "", mine).decode() != mine:
            raise LayoutError(f"two launchers say --node-rank {self.hosts.rank}; each host has a number of its own")
        found = []
        for rank in range(self.hosts.count):
            try:
                found.append(json.loads(self._store.get(f"{key}{rank}")))
            except RuntimeError as error:
                raise LayoutError(
                    f"host {rank} of {self.hosts.count} has not come within {_MEETING_SECONDS:.0f} s; start it with --node-rank {rank}"
                ) from error
        for rank, other in enumerate(found):
            for name, theirs, first in [
                ("--nnodes", other["hosts"], found[0]["hosts"]),
                *((name, other["agreed"].get(name), value) for name, value in found[0]["agreed"].items()),
            ]:
                if theirs != first:
                    raise LayoutError(f"{name} is {first} on host 0 and {theirs} on host {rank}; give all hosts the same")
        return [int(other["processes"]) for other in found]

    @property
    def world_size(self) -> int:
        """Return the number of processes on all hosts."""
        return sum(self.processes)

    @property
    def first_rank(self) -> int:
        """Return the global rank of this host's first process."""
        return sum(self.processes[: self.hosts.rank])

    def _beat(self, store: Any) -> None:
        """Say now and then that this host is there."""
        number = 0
        while not self._stop.wait(_BEAT_SECONDS):
            number += 1
            try:
                store.set(f"dufu/beat/{self.hosts.rank}", str(number))
            except RuntimeError:
                return  # the first host is gone, which `trouble` notices

    def trouble(self, attempt: int) -> str:
        """Return why this host's processes should end: others have failed elsewhere, or a host is gone; "" if all is well."""
        for rank in self._others():
            outcome = self._outcome(attempt, rank)
            if outcome is None:
                self._listen(rank)
            elif exit_status([f.code for f in outcome.failures]) in (1, 2):
                return f"host {rank} failed"
        return ""

    def _others(self) -> list[int]:
        return [rank for rank in range(self.hosts.count) if rank != self.hosts.rank]

    def _outcome(self, attempt: int, rank: int) -> Outcome | None:
        key = f"dufu/outcome/{attempt}/{rank}"
        try:
            if not self._store.check([key]):
                return None
            value = json.loads(self._store.get(key))
        except RuntimeError as error:
            raise HostLost(f"the launcher of host 0 ({self.address}) does not answer any more") from error
        return Outcome([Failure(**f) for f in value["failures"]], value["step"])

    def _listen(self, rank: int) -> None:
        try:
            key = f"dufu/beat/{rank}"
            beat = self._store.get(key) if self._store.check([key]) else b""
        except RuntimeError as error:
            raise HostLost(f"the launcher of host 0 ({self.address}) does not answer any more") from error
        now = time.monotonic()
        if self._heard.get(rank, (None, 0.0))[0] != beat:
            self._heard[rank] = (beat, now)
        elif now - self._heard[rank][1] > _SILENCE_SECONDS:
            raise HostLost(f"host {rank} has not answered for {_SILENCE_SECONDS:.0f} s")

    def exchange(self, attempt: int, mine: Outcome) -> list[Outcome]:
        """Return every host's outcome of an attempt, once all have one.

        Raises:
            HostLost: one does not answer any more.
        """
        if self.hosts.count == 1:
            return [mine]
        try:
            self._store.set(f"dufu/outcome/{attempt}/{self.hosts.rank}", json.dumps(asdict(mine)))
        except RuntimeError as error:
            raise HostLost(f"the launcher of host 0 ({self.address}) does not answer any more") from error
        found = {self.hosts.rank: mine}
        while len(found) < self.hosts.count:
            for rank in self._others():
                outcome = None if rank in found else self._outcome(attempt, rank)
                if outcome is not None:
                    found[rank] = outcome
                elif rank not in found:
                    self._listen(rank)
            time.sleep(0.05)
        return [found[rank] for rank in range(self.hosts.count)]

    def part(self) -> None:
        """Leave, the first host last: the others still read in its store."""
        self._stop.set()
        if self.hosts.count == 1:
            return
        try:
            self._store.add("dufu/parted", 1)
            end = time.monotonic() + 5.0
            while self.hosts.rank == 0 and time.monotonic() < end and self._store.add("dufu/parted", 0) < self.hosts.count:
                time.sleep(0.05)
        except RuntimeError:
            return


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
