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
from dufu.parallel.layout import ParallelLayout

_joined: WeakSet[Communicator] = WeakSet()


@dataclass(frozen=True)
class Processes:
    """The communicators of a layout on this process."""

    layout: ParallelLayout
    world: Communicator
    data: Communicator
    tensor: Communicator
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Say whether this process writes files and prints."""
        return self.world.rank == 0

    @cached_property
    def rank(self) -> int:
        """Return the global rank."""
        return self.world.rank


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
    """Return the number of processes that the launcher started (1 without a launcher)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_processes() -> int:
    """Return the number of processes that the launcher started on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def global_rank() -> int:
    """Return this process's rank as the launcher numbered it."""
    return int(os.environ.get("RANK", "0"))


def join(layout: ParallelLayout, device: torch.device, timeout_seconds: float = 1800.0) -> Processes:
    """Join the process group, if there are several processes, and make the layout's communicators."""
    if layout.world == 1:
        return Processes(layout, alone("world"), alone("data"), alone("tensor"), device)
    timeout = timedelta(seconds=timeout_seconds)
    if not dist.is_initialized():
        store, number, size = _meeting_place(timeout)
        backend = "nccl" if device.type == "cuda" else "gloo"
        own = dist.PrefixStore(f"dufu-join-{_meeting.joins}", store)
        dist.init_process_group(backend, store=own, rank=number, world_size=size, timeout=timeout)
    rank = dist.get_rank()

    def communicator(name: str, groups: list[list[int]]) -> Communicator:
        mine = next(g for g in groups if rank in g)
        if len(mine) == 1:
            return Communicator(name, None, mine, 0)
        if len(mine) == layout.world:
            return Communicator(name, dist.group.WORLD, mine, rank)
        group, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout)
        return Communicator(name, group, mine, mine.index(rank))

    world = Communicator("world", dist.group.WORLD, list(range(layout.world)), rank)
    data = communicator("data", layout.data_groups())
    tensor = communicator("tensor", layout.tensor_groups())
    _joined.update((world, data, tensor))
    return Processes(layout, world, data, tensor, device)


def leave() -> None:
    """Leave the process group; the communicators made for it are of no use afterwards.

    A gloo thread that has just carried a message waits for the interpreter to give up the message's tensor; if the interpreter ends
    first, the process aborts. Giving up every reference to the groups ends the threads in order.
    """
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
