"""This process among the others: device, process groups, thread count. The only place that chooses a device."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from dufu.errors import LayoutError
from dufu.parallel.collectives import Communicator, alone
from dufu.parallel.hosts import adopt_environment, settle_network
from dufu.parallel.layout import ParallelLayout
from dufu.parallel.watch import start_watching, stop_watching

_joined: WeakSet[Communicator] = WeakSet()


@dataclass(frozen=True)
class Processes:
    """The communicators of a layout on this process; see `ParallelLayout.groups` for what each dimension is."""

    layout: ParallelLayout
    device: torch.device
    world: Communicator
    data: Communicator
    tensor: Communicator
    context: Communicator
    pipeline: Communicator
    replicas: Communicator
    expert: Communicator
    expert_replicas: Communicator
    shard: Communicator
    repeat: Communicator

    @property
    def is_main(self) -> bool:
        """Say whether this process writes files and prints."""
        return self.world.rank == 0

    @cached_property
    def rank(self) -> int:
        """Return the global rank."""
        return self.world.rank

    @property
    def counts_tokens(self) -> bool:
        """Say whether this process counts what its part of the batch scores: one of those that see the same tokens."""
        return self.tensor.rank == 0 and self.pipeline.rank == 0


def choose_device(name: str | None) -> torch.device:
    """Return the device of this process: the named type, or CUDA where there is one, otherwise the CPU.

    Raises:
        LayoutError: the named type is not there.
    """
    kind = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind.split(":")[0] == "cpu":
        return torch.device("cpu")
    module = getattr(torch, kind.split(":")[0], None)
    if not getattr(module, "is_available", bool)():
        raise LayoutError(f"train.input_placement_device={kind}: PyTorch finds no such device here; available: cpu")
    assert module is not None
    device = torch.device(kind if ":" in kind else f"{kind}:{int(os.environ.get('LOCAL_RANK', 0)) % module.device_count()}")
    module.set_device(device)
    return device


@dataclass
class _Meeting:
    """Where this process meets the others: kept, because a second group must neither meet at a place that is closing nor read the
    first one's addresses there."""

    key: tuple[str, ...] = ()
    place: tuple[Any, int, int] | None = None  # the store, this process's rank, the number of processes
    joins: int = 0


_meeting = _Meeting()


def _meeting_place(timeout: timedelta) -> tuple[Any, int, int]:
    """Return the launcher's store, this process's rank and the number of processes; the same as long as the launch is."""
    key = tuple(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"))
    if _meeting.place is None or _meeting.key != key:
        _meeting.key, _meeting.joins = key, 0
        _meeting.place = next(dist.rendezvous("env://", timeout=timeout))
    _meeting.joins += 1
    return _meeting.place


def world_size() -> int:
    """Return the number of processes that the launcher, or Slurm, started (1 without either)."""
    adopt_environment()
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_processes() -> int:
    """Return the number of processes that the launcher, or Slurm, started on this host."""
    adopt_environment()
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def global_rank() -> int:
    """Return this process's rank as the launcher, or Slurm, numbered it."""
    adopt_environment()
    return int(os.environ.get("RANK", "0"))


DIMENSIONS = ("tensor", "context", "data", "pipeline", "replicas", "expert", "expert_replicas", "shard", "repeat")


def join(layout: ParallelLayout, device: torch.device, timeout_seconds: float = 1800.0) -> Processes:
    """Join the process group, if there are several processes, and make the layout's communicators.

    Args:
        timeout_seconds: how long an operation between processes may take before it is explained and all end.
    """
    if layout.world == 1:
        return Processes(layout, device, alone("world"), **{name: alone(name) for name in DIMENSIONS})
    # The watching thread's explanation comes first; the groups' own timeout is for where the thread cannot run.
    timeout = timedelta(seconds=timeout_seconds + 60.0)
    if not dist.is_initialized():
        if local_processes() < world_size():
            settle_network(os.environ.get("MASTER_ADDR", ""))
        store, number, size = _meeting_place(timeout)
        backend = "nccl" if device.type == "cuda" else "gloo"
        # A launcher's store outlives the processes of an attempt.
        unique = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{_meeting.joins}"
        own = dist.PrefixStore(f"dufu-join-{unique}", store)
        dist.init_process_group(backend, store=own, rank=number, world_size=size, timeout=timeout)
        start_watching(store, f"dufu-watch-{unique}", number, size, timeout_seconds)
    rank = dist.get_rank()
    made: dict[tuple[tuple[int, ...], ...], Communicator] = {}  # dimensions of the same processes share a communicator

    def communicator(name: str) -> Communicator:
        groups = layout.groups(name)
        if len(groups[0]) == 1:
            return Communicator(name, None, next(g for g in groups if rank in g), 0)
        key = tuple(sorted(map(tuple, groups)))
        if key not in made:
            mine = next(g for g in groups if rank in g)
            group = None
            if len(mine) == layout.world:
                group = dist.group.WORLD
            else:
                group, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout)
            made[key] = Communicator(name, group, mine, mine.index(rank))
        return made[key]

    communicators = {name: communicator(name) for name in DIMENSIONS}
    world = Communicator("world", dist.group.WORLD, list(range(layout.world)), rank)
    _joined.update((world, *made.values()))
    return Processes(layout, device, world, **communicators)


def subset(processes: Processes, name: str, members: list[int]) -> Communicator:
    """Return a communicator of some of the pipeline's processes, for each pipeline; every process calls it alike.

    Args:
        members: places in the pipeline.
    """
    layout, rank = processes.layout, processes.rank
    members = sorted(members)
    if len(members) == layout.pipeline:
        return processes.pipeline
    rows = layout.groups("pipeline")
    groups = [[row[p] for p in members] for row in rows] + [[row[p]] for row in rows for p in range(len(row)) if p not in members]
    mine = next(g for g in groups if rank in g)
    group: Any = None
    for each in groups:
        made = dist.new_group(each) if len(each) > 1 else None
        group = made if each == mine else group
    found = Communicator(name, group, mine, mine.index(rank))
    _joined.add(found)
    return found


def leave() -> None:
    """Leave the process group; the communicators made for it are of no use afterwards.

    A gloo thread that has just carried a message waits for the interpreter to give up the message's tensor; if the interpreter ends
    first, the process aborts. Giving up every reference to the groups ends the threads in order.
    """
    stop_watching()
    for communicator in _joined:
        communicator.group = None
    _joined.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def settle_threads(local_processes: int) -> None:
    """Share the cores among the processes of this host, unless the user set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_processes))


def settle_allocator() -> None:
    """Keep freed memory in the process: glibc otherwise returns every large tensor to the system and faults it in anew."""
    if sys.platform.startswith("linux"):
        try:
            libc = ctypes.CDLL("libc.so.6")
            trim_threshold, mmap_threshold = -1, -3
            libc.mallopt(mmap_threshold, 1 << 30)
            libc.mallopt(trim_threshold, (1 << 31) - 1)
        except (OSError, AttributeError):
            pass  # another C library: only slower
