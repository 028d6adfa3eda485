"""Explain a collective that does not return: who waits where for what, who is elsewhere, and who does not answer.

Every operation between processes notes itself while it is under way (`Watched`). A thread in each process looks at the oldest one now and
then; when it is older than the timeout, that thread raises an alarm at the store where the processes met. The threads of all processes
answer what theirs are doing, one prints the explanation, and all end. A process that computes, sleeps or reads answers as well: only the
thread needs to run.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dufu.parallel.launch import note_stuck, speak_for_all

_HOME = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PLUMBING = (__file__, str(Path(__file__).with_name("collectives.py")))
_ANSWER_SECONDS = 3.0  # how long an explanation waits for answers
_STORE_SECONDS = 10.0  # after which the place where the processes met counts as gone

_under_way: dict[int, Watched] = {}  # by thread
_launched: deque[tuple[Watched, Any]] = deque()  # on a device, where an operation goes on after its call has returned
_unit_names: dict[int, str] = {}


class Watched:
    """An operation between processes, from its call to its return.

    Args:
        communicator: whose members take part.
        kind: such as "all_reduce".
        tensor: what this process gives or receives; None for an object.
        peer: the other process of a message between two; collectives are numbered instead, the same on every member.
    """

    __slots__ = ("_outer", "communicator", "kind", "number", "on_device", "peer", "since", "tensor", "thread")

    def __init__(self, communicator: Any, kind: str, tensor: Tensor | None = None, peer: int | None = None) -> None:
        if peer is None:
            communicator.calls += 1
        self.communicator, self.kind, self.tensor, self.peer, self.number = communicator, kind, tensor, peer, communicator.calls
        self.on_device = tensor is not None and tensor.is_cuda
        self.since = 0.0

    def __enter__(self) -> Watched:
        self.since, self.thread = time.monotonic(), threading.get_ident()
        self._outer = _under_way.get(self.thread)
        _under_way[self.thread] = self
        return self

    def __exit__(self, *error: object) -> None:
        if self._outer is None:
            del _under_way[self.thread]
        else:
            _under_way[self.thread] = self._outer
        if self.on_device and _watcher is not None and self.tensor is not None and error[0] is None:
            event = torch.cuda.Event()
            event.record()
            self.tensor = torch.empty_like(self.tensor, device="meta")  # its memory is free to go
            _launched.append((self, event))


class WatchedWork:
    """An operation that goes on after its call: it is waited for under watch.

    Args:
        work: PyTorch's.
        operation: what it is.
    """

    __slots__ = ("_operation", "_work")

    def __init__(self, work: Any, operation: Watched) -> None:
        self._work, self._operation = work, operation

    def wait(self) -> None:
        """Wait until it is done."""
        with self._operation:
            self._work.wait()

    def is_completed(self) -> bool:
        """Say whether it is done."""
        return bool(self._work.is_completed())


def name_units(units: dict[str, Any]) -> None:
    """Let explanations name the model's units.

    Args:
        units: modules by name.
    """
    _unit_names.clear()
    _unit_names.update({id(unit): name for name, unit in units.items()})


class Watcher:
    """The thread that looks after this process's operations.

    Args:
        store: where the processes met; used by this thread alone.
        rank, size: this process and the number of all.
        timeout_seconds: how long an operation may take.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_seconds: float) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout_seconds
        self._caller = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dufu-stuck", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; others learn that this process has left in order."""
        self._stop.set()
        self._thread.join(1.0)
        if not self._thread.is_alive():
            try:
                self.store.set(f"left/{self.rank}", "1")
            except RuntimeError:
                return  # whoever kept the store has left before

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self.timeout / 4)):
            late: Watched | None = None
            try:
                late = self._late()
                if late is not None:
                    self.store.compare_set("alarm", "", str(self.rank))
                if self.store.check(["alarm"]):
                    self._end()
            except RuntimeError:
                if late is not None and not self._stop.is_set():
                    lines = [f"process {self.rank} {self._state()}", "the place where the processes met does not answer any more"]
                    _finish(_text(late, self.timeout, lines))

    def _oldest(self) -> Watched | None:
        while _launched and _launched[0][1].query():
            _launched.popleft()
        found = [operation for operation in [*list(_under_way.values()), *(o for o, _ in list(_launched)[:1])] if operation.since]
        return min(found, key=lambda o: o.since, default=None)

    def _late(self) -> Watched | None:
        oldest = self._oldest()
        return oldest if oldest is not None and time.monotonic() - oldest.since > self.timeout else None

    def _state(self) -> str:
        """Say what this process is doing."""
        operation, frames = self._oldest(), sys._current_frames()
        if operation is None:
            return f"is elsewhere: {_place(frames.get(self._caller))}"
        return f"waits {_describe(operation)}; {_place(frames.get(operation.thread))}"

    def _end(self) -> None:
        """Answer, explain if the alarm is this process's, and end the process."""
        operation = self._oldest()
        answer = {"state": self._state(), "operation": _identity(operation) if operation and operation.peer is None else None}
        self.store.set(f"answer/{self.rank}", json.dumps(answer))
        end = time.monotonic() + _ANSWER_SECONDS
        mine = self.store.get("alarm").decode() == str(self.rank)
        while time.monotonic() < end + (0 if mine else 1):
            missing = [r for r in range(self.size) if not self.store.check([f"answer/{r}"])]
            if self.store.check(["explained"]) or (mine and not [r for r in missing if not self.store.check([f"left/{r}"])]):
                break
            time.sleep(0.05)
        if mine:
            answers = {r: json.loads(self.store.get(f"answer/{r}")) for r in range(self.size) if r not in missing}
            lines = [f"process {rank} {answer['state']}" for rank, answer in answers.items()]
            for rank in missing:
                left = self.store.check([f"left/{rank}"])
                lines.append(
                    f"process {rank} has left the others" if left else f"process {rank} does not answer: it is dead or cut off"
                )
            lines += _different({rank: a["operation"] for rank, a in answers.items() if a["operation"]})
            speak_for_all()  # before the others lose their connection to this process
            print(_text(operation, self.timeout, lines), file=sys.stderr, flush=True)
            self.store.set("explained", "1")
        note_stuck()
        os._exit(1)


_watcher: Watcher | None = None


def start_watching(store: Any, prefix: str, rank: int, size: int, timeout_seconds: float) -> None:
    """Start this process's thread, once.

    Args:
        store: where the processes met.
        prefix: of the keys used there, one for each time they join.
    """
    global _watcher
    if _watcher is not None:
        return
    own = store.clone()  # a blocked call of the main thread must not block this one
    own.set_timeout(timedelta(seconds=_STORE_SECONDS))
    _watcher = Watcher(dist.PrefixStore(prefix, own), rank, size, timeout_seconds)


def stop_watching() -> None:
    """End the thread."""
    global _watcher
    if _watcher is not None:
        _watcher.stop()
    _watcher = None
    _launched.clear()
    _unit_names.clear()


def _finish(text: str) -> None:
    if speak_for_all():
        print(text, file=sys.stderr, flush=True)
    note_stuck()
    os._exit(1)


def _text(operation: Watched | None, timeout: float, lines: list[str]) -> str:
    what = "an operation" if operation is None else f"{operation.kind} over {operation.communicator.name}"
    return "\n  ".join([f"stuck: {what} has taken longer than train.dist.timeout ({timeout:g} s); all processes end", *lines])


def _identity(operation: Watched) -> dict[str, Any]:
    """Return what the members of a group must agree on."""
    group = operation.communicator
    return {"group": group.ranks, "name": group.name, "kind": operation.kind, "number": operation.number}


def _different(operations: dict[int, dict[str, Any]]) -> list[str]:
    """Say where members of one group wait for different things."""
    found = []
    for rank, one in operations.items():
        first, other = next((r, o) for r, o in operations.items() if o["group"] == one["group"] and o["name"] == one["name"])
        if (one["kind"], one["number"]) != (other["kind"], other["number"]):
            found.append(
                f"these are different operations: process {first} makes {other['kind']} number {other['number']} over {other['name']}, "
                f"process {rank} makes {one['kind']} number {one['number']}; every member of a group must make the same ones in one order"
            )
    return found[:1]


def _describe(operation: Watched) -> str:
    group, tensor = operation.communicator, operation.tensor
    which = f"number {operation.number}" if operation.peer is None else f"with process {operation.peer}"
    what = f"{operation.kind} ({which} over {group.name}, processes {_some(group.ranks)})"
    if tensor is not None:
        size = tensor.numel() * tensor.element_size()
        what += f" of {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, {size:,} bytes"
    return f"in {what}, since {time.monotonic() - operation.since:.1f} s"


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} … {ranks[-1]} ({len(ranks)})"


def _place(frame: FrameType | None) -> str:
    """Say where in dufu, and in what it called, a thread is, and in which unit of the model."""
    own, dufu, unit = "", "", ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path not in _PLUMBING:
            if not dufu and path.startswith(_HOME + os.sep):
                dufu = f"{os.path.relpath(path, os.path.dirname(_HOME))}:{frame.f_lineno} in {frame.f_code.co_name}"
            elif not own and not dufu and not path.startswith((*_LIBRARIES, "<")):
                own = f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
            unit = unit or _unit_names.get(id(frame.f_locals.get("self")), "")
        frame = frame.f_back
    parts = [p for p in (own and f"at {own}", dufu and f"{'called by' if own else 'at'} {dufu}", unit and f"unit {unit}") if p]
    return ", ".join(parts) or "outside dufu"
