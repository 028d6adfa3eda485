"""Before the first step all processes compare what must be the same on them; where something differs, the message says what and where."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import time
from collections.abc import Callable, Mapping

import torch

import dufu
from dufu.errors import DufuError
from dufu.parallel.process import Processes

Facts = Mapping[str, Mapping[str, str]]

# Further apart, times in logs cannot be compared and "stop after" means different moments.
CLOCK_SECONDS = 10.0


def versions() -> dict[str, str]:
    """Return the versions of what computes the numbers."""
    return {"Python": platform.python_version(), "PyTorch": str(torch.__version__), "dufu": dufu.__version__}


def agree(processes: Processes, facts: Facts, clock: Callable[[], float] = time.time) -> None:
    """Compare facts over all processes: one small message each, and the values themselves only where a hash differs.

    Args:
        facts: values by name, in groups by name. A name that only some processes have (their stage's layers) is compared among those.
        clock: seconds since 1970.

    Raises:
        DufuError: names the process, the thing and both values; on every process.
    """
    world = processes.world
    if world.size == 1:
        return
    hashes = {group: _hash(values) for group, values in facts.items()}
    world.barrier()  # so that all read their clocks in the same moment
    gathered = world.objects((socket.gethostname(), hashes, clock()))
    hosts = [host for host, _, _ in gathered]
    for group in dict.fromkeys(name for _, found, _ in gathered for name in found):
        if len({found[group] for _, found, _ in gathered if group in found}) > 1:
            _compare(group, world.objects(dict(facts.get(group, {}))), hosts)
    first = gathered[0][2]
    for rank, (_, _, now) in enumerate(gathered):
        if abs(now - first) > CLOCK_SECONDS:
            raise DufuError(
                f"process {rank} (on {hosts[rank]}): its clock is {abs(now - first):.0f} s {'ahead of' if now > first else 'behind'} that of "
                f"process 0 (on {hosts[0]}); set the clocks of all hosts, such as by NTP"
            )


def _hash(values: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(values.items())).encode()).hexdigest()[:16]


def _compare(group: str, values: list[dict[str, str]], hosts: list[str]) -> None:
    """Raise for the first value that differs from that of the first process which has it."""
    seen: dict[str, int] = {}
    for rank, mine in enumerate(values):
        for name, value in mine.items():
            first = seen.setdefault(name, rank)
            if values[first][name] != value:
                raise DufuError(
                    f"process {rank} (on {hosts[rank]}) differs from process {first} (on {hosts[first]}) in its {group}: {name} is {value} "
                    f"there and {values[first][name]} here; give all processes the same"
                )
