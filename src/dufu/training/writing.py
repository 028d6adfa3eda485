"""Writing a checkpoint: every process its pieces, beside the finished ones, and one rename at the end.

`begin` takes hold of what is to be written, `finish` makes the checkpoint complete; both are called by every process. In between a
thread may write copies while training goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dufu.errors import CheckpointError
from dufu.interchange.files import digest, sync, write_arrays, write_text
from dufu.optim import WholeParameterOptimizer
from dufu.parallel.parameters import Entry
from dufu.parallel.process import Processes
from dufu.parallel.region import Region, whole_region
from dufu.parallel.store import ParameterStore
from dufu.training.checkpoint import FORMAT, holdings


@dataclass
class Pieces:
    """What one process writes.

    Args:
        arrays: flat values by key, float32.
        records: which rectangle of which tensor each of them is.
        scalars: the optimizer's numbers by parameter.
    """

    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)


def _mine(entries: list[Entry]) -> Iterator[bool]:
    """Say of each entry whether this process saves it: of equal copies one does, so that all have about as much to write."""
    total, before = sum(e.tensor.numel() for e in entries), 0
    for entry in entries:
        copies = entry.spread.reduce if entry.unsharded else entry.spread.repeat
        writer = before * copies.size // max(1, total)
        before += entry.tensor.numel()
        yield entry.first and writer == copies.rank


def take_pieces(
    store: ParameterStore, optimizer: torch.optim.Optimizer, processes: Processes, copy: bool, averages: Sequence[Tensor] = ()
) -> Pieces:
    """Return this process's pieces of the weights, their averages and the optimizer's state.

    Args:
        copy: whether the arrays must keep their values while training goes on.
        averages: of the trained entries, where a run keeps them.
    """
    pieces = Pieces()
    entries = [*store.entries, *store.frozen]
    chosen = {id(entry) for entry, mine in zip(entries, _mine(entries)) if mine}
    file = f"rank_{processes.rank:05d}.safetensors"

    def take(kind: str, name: str, shape: tuple[int, ...], region: Region, stretch: Tensor) -> None:
        key = f"{kind}/{name}"
        array = stretch.float().cpu().numpy()
        pieces.arrays[key] = array.copy() if copy and stretch.device.type == "cpu" and stretch.dtype == torch.float32 else array
        pieces.records.append(
            {"file": file, "key": key, "kind": kind, "name": name, "shape": list(shape), "region": region.to_json(),
             "dtype": str(stretch.dtype).removeprefix("torch.")}
        )  # fmt: skip

    for kind, entry, values in holdings(store, optimizer, averages):
        if id(entry) not in chosen:
            continue
        flat = values.reshape(-1)
        for piece in entry.pieces:
            if count := piece.region.numel:
                take(kind, piece.info.name, piece.info.shape, piece.region, flat[piece.start : piece.start + count])
    if isinstance(optimizer, WholeParameterOptimizer) and processes.replicas.rank == processes.tensor.rank == 0:
        holder = {info.name: info.holders[0] for info in store.infos}
        for kind, tensors in optimizer.named_state().items():
            for name, tensor in tensors.items():
                if holder[name] != processes.pipeline.rank:
                    continue
                take(kind, name, tuple(tensor.shape), whole_region(tuple(tensor.shape)), tensor.reshape(-1))
    for entry in store.entries:
        if id(entry) not in chosen:
            continue
        numbers = {
            kind: float(value)
            for kind, value in optimizer.state.get(entry.tensor, {}).items()
            if not isinstance(value, Tensor) or value.dim() == 0
        }
        for piece in entry.pieces:
            pieces.scalars[piece.info.name] = numbers
    return pieces


class Writing:
    """A checkpoint that is being written.

    Args:
        folder: the finished checkpoint's path.
        processes: all that write.
        pieces: this process's.
        state: JSON values, the same on every process.
        config: the effective config as YAML.
    """

    def __init__(self, folder: Path, processes: Processes, pieces: Pieces, state: dict[str, Any], config: str) -> None:
        self.folder, self.processes, self.pieces = folder, processes, pieces
        self.part = folder.with_name(f"{folder.name}.part")
        self._state, self._config = json.dumps(state), config  # as text: the state's lists may change meanwhile
        self._files: dict[str, Any] = {}
        self._failure = ""
        self._thread: Thread | None = None

    def begin(self, in_thread: bool = False) -> None:
        """Make room and write this process's pieces, or have a thread write them.

        Raises:
            CheckpointError: there is no room; on every process.
        """
        self.processes.world.meet("saving a checkpoint")
        failure = ""
        if self.processes.is_main:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.part)
            try:
                self.part.mkdir(parents=True)
            except OSError as error:
                failure = str(error)
        self._agree(failure)
        if in_thread:
            self._thread = Thread(target=self._write, name="dufu-checkpoint")
            self._thread.start()
        else:
            self._write()

    def _write(self) -> None:
        """Write this process's file; a failure is kept for `finish`."""
        path = self.part / f"rank_{self.processes.rank:05d}.safetensors"
        try:
            if self.pieces.arrays:
                self._files = {path.name: write_arrays(path, self.pieces.arrays)}
        except OSError as error:
            self._failure = f"process {self.processes.rank}: {error}"
        self.pieces.arrays = {}

    @property
    def written(self) -> bool:
        """Say whether this process's thread is done."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self, publish: Callable[[], None]) -> None:
        """Wait for all pieces, give the checkpoint its manifest and its name.

        Args:
            publish: run by the main process once the checkpoint is complete, before any process goes on.

        Raises:
            CheckpointError: a process could not write (a full disk); the unfinished folder is removed; on every process.
        """
        if self._thread is not None:
            self._thread.join()
        gathered = self.processes.world.objects((self._failure, self.pieces.records, self._files, self.pieces.scalars))
        failure = next((f for f, *_ in gathered if f), "")
        if self.processes.is_main and not failure:
            try:
                self._complete(gathered)
                publish()
            except OSError as error:
                failure = str(error)
        self._agree(failure)

    def abandon(self) -> None:
        """Give up after an error elsewhere: other processes may be anywhere, so nothing is said to them."""
        if self._thread is not None:
            self._thread.join()
        if self.processes.is_main:
            shutil.rmtree(self.part, ignore_errors=True)

    def _agree(self, failure: str) -> None:
        """Raise on every process what the main one found."""
        failure = self.processes.world.objects(failure)[0]
        if failure:
            if self.processes.is_main:
                shutil.rmtree(self.part, ignore_errors=True)
            raise CheckpointError(f"{self.folder}: could not be written ({failure}); the previous checkpoint is untouched")

    def _complete(self, gathered: list[Any]) -> None:
        part, folder = self.part, self.folder
        records = [r for _, found, _, _ in gathered for r in found]
        files = {name: value for _, _, found, _ in gathered for name, value in found.items()}
        scalars = {name: value for *_, found in gathered for name, value in found.items()}
        texts = {
            "index.json": json.dumps({"format": FORMAT, "pieces": records}),
            "state.json": json.dumps({**json.loads(self._state), "optimizer_scalars": scalars}, indent=1),
            "config.yaml": self._config,
        }
        for name, text in texts.items():
            write_text(part / name, text)
            files[name] = digest(part / name)
        write_text(part / "manifest.json", json.dumps({"format": FORMAT, "files": files}, indent=1))
        sync(part)
        if folder.exists():
            old = folder.with_name(f"{folder.name}.removed")
            os.replace(folder, old)
            os.replace(part, folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(part, folder)
        sync(folder.parent)
