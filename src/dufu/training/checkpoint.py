"""Checkpoints: complete or absent, in any layout's pieces, readable into any other layout. Loading executes nothing.

A checkpoint is a folder: `rank_00000.safetensors` … hold flat pieces of the weights and the optimizer's state; `index.json` says which
rectangle of which tensor each piece is; `state.json` holds everything else; `config.yaml` the effective config; `manifest.json` the size
and sha256 of every file. It is written under another name, synced, and renamed when complete; `latest` moves last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from dufu.errors import CheckpointError
from dufu.parallel.parameters import Entry, Piece
from dufu.parallel.process import Processes
from dufu.parallel.region import Region, copy_overlap
from dufu.parallel.store import ParameterStore

FORMAT = 1
WEIGHT = "weight"
_STEP = re.compile(r"^step_(\d+)$")


def step_folder(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step_{step:07d}"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it has either its old content or its new one."""
    part = path.with_name(f".{path.name}.part{os.getpid()}")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    _sync(path.parent)


def holdings(store: ParameterStore, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Entry, Tensor]]:
    """Yield (kind, entry, values) of the weights and of every optimizer state that has their shape."""
    for entry in (*store.entries, *store.frozen):
        yield WEIGHT, entry, entry.tensor.detach()
    if optimizer is None:
        return
    for entry in store.entries:
        for kind, value in optimizer.state.get(entry.tensor, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.numel() == entry.tensor.numel():
                yield kind, entry, value


def _mine(store: ParameterStore, entry: Entry, processes: Processes) -> bool:
    """Say whether this process saves an entry: of equal copies, the first one does."""
    return (store.sharded or processes.data.rank == 0) and (entry.divided or processes.tensor.rank == 0)


def _scalars(store: ParameterStore, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for entry in store.entries:
        values = {
            kind: float(value)
            for kind, value in optimizer.state.get(entry.tensor, {}).items()
            if not isinstance(value, Tensor) or value.dim() == 0
        }
        for piece in entry.pieces:
            found[piece.info.name] = values
    return found


def save(
    folder: Path,
    *,
    store: ParameterStore,
    optimizer: torch.optim.Optimizer,
    processes: Processes,
    state: dict[str, Any],
    config: str,
) -> Path:
    """Write a checkpoint; called by every process.

    Args:
        folder: the finished checkpoint's path; its parent exists.
        state: JSON values, the same on every process.
        config: the effective config as YAML.

    Raises:
        CheckpointError: a process could not write (a full disk); the unfinished folder is removed.
    """
    part = folder.with_name(f"{folder.name}.part")
    world = processes.world
    failure = ""
    if processes.is_main:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(part)
        try:
            part.mkdir(parents=True)
        except OSError as error:
            failure = f"{error}"
    failures = [f for f in world.objects(failure) if f]
    records: list[dict[str, Any]] = []
    files: dict[str, Any] = {}
    scalars: dict[str, dict[str, float]] = {}
    if not failures:
        try:
            records, files = _write_pieces(part, store, optimizer, processes)
            scalars = _scalars(store, optimizer)
        except OSError as error:
            failure = f"process {world.rank}: {error}"
    gathered = world.objects((failure, records, files, scalars))
    failures += [f for f, *_ in gathered if f]
    if processes.is_main and not failures:
        try:
            _finish(part, folder, gathered, state, config)
        except OSError as error:
            failures = [str(error)]
    failures = world.objects(failures)[0] if world.size > 1 else failures
    if failures:
        if processes.is_main:
            shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(f"{folder}: could not be written ({failures[0]}); the previous checkpoint is untouched")
    return folder


def _write_pieces(
    part: Path, store: ParameterStore, optimizer: torch.optim.Optimizer, processes: Processes
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    name = f"rank_{processes.rank:05d}.safetensors"
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    records: list[dict[str, Any]] = []
    for kind, entry, values in holdings(store, optimizer):
        if not _mine(store, entry, processes):
            continue
        flat = values.reshape(-1)
        for piece in entry.pieces:
            count = piece.region.numel
            if not count:
                continue
            key = f"{kind}/{piece.info.name}"
            tensors[key] = flat[piece.start : piece.start + count].float().cpu().numpy()
            records.append(
                {"file": name, "key": key, "kind": kind, "name": piece.info.name, "shape": list(piece.info.shape),
                 "region": piece.region.to_json()}
            )  # fmt: skip
    if not tensors:
        return [], {}
    try:
        save_file(tensors, str(part / name))
    except SafetensorError as error:
        raise OSError(str(error)) from error
    _sync(part / name)
    return records, {name: _digest(part / name)}


def _finish(part: Path, folder: Path, gathered: list[Any], state: dict[str, Any], config: str) -> None:
    records = [r for _, found, _, _ in gathered for r in found]
    files = {name: value for _, _, found, _ in gathered for name, value in found.items()}
    scalars = {name: value for *_, found in gathered for name, value in found.items()}
    texts = {
        "index.json": json.dumps({"format": FORMAT, "pieces": records}),
        "state.json": json.dumps({**state, "optimizer_scalars": scalars}, indent=1),
        "config.yaml": config,
    }
    for name, text in texts.items():
        write_text(part / name, text)
        files[name] = _digest(part / name)
    write_text(part / "manifest.json", json.dumps({"format": FORMAT, "files": files}, indent=1))
    _sync(part)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(part, folder)
    _sync(folder.parent)


class CheckpointReader:
    """A complete checkpoint.

    Args:
        folder: the checkpoint.
        verify: whether to compare every file with its checksum.

    Raises:
        CheckpointError: incomplete, damaged, or written by a later version.
    """

    def __init__(self, folder: str | Path, verify: bool = True) -> None:
        self.folder = Path(folder)
        manifest = self._json("manifest.json")
        if manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"{self.folder}: checkpoint format {manifest.get('format')}; this program reads format {FORMAT}, "
                f"a newer dufu may have written it"
            )
        for name, expected in manifest["files"].items():
            path = self.folder / name
            if not path.is_file():
                raise CheckpointError(f"{path}: missing, though the manifest names it; the checkpoint is incomplete")
            if path.stat().st_size != expected["bytes"]:
                raise CheckpointError(f"{path}: {path.stat().st_size} bytes instead of {expected['bytes']}; it is damaged")
            if verify and _digest(path)["sha256"] != expected["sha256"]:
                raise CheckpointError(f"{path}: its checksum differs from the manifest's; it is damaged")
        self.state: dict[str, Any] = self._json("state.json")
        self.pieces: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for record in self._json("index.json")["pieces"]:
            self.pieces.setdefault((record["kind"], record["name"]), []).append(record)
        self._open: dict[str, Any] = {}

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing; {self.folder} is no complete checkpoint") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: not a JSON object")
        return value

    def names(self) -> set[str]:
        """Return the names of the saved weights."""
        return {name for kind, name in self.pieces if kind == WEIGHT}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a saved weight."""
        return tuple(self.pieces[WEIGHT, name][0]["shape"])

    def _tensor(self, record: dict[str, Any]) -> Tensor:
        file = record["file"]
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(self.folder / file), framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{self.folder / file}: not a safetensors file ({error})") from error
        tensor: Tensor = self._open[file].get_tensor(record["key"])
        return tensor

    def fill(self, kind: str, piece: Piece, memory: Tensor) -> None:
        """Fill a piece's stretch of flat memory with what the checkpoint holds of it; padding becomes zero.

        Raises:
            CheckpointError: the shapes differ or a part is missing.
        """
        name, region = piece.info.name, piece.region
        records = self.pieces.get((kind, name))
        if records is None:
            raise CheckpointError(f"{self.folder}: holds no {kind} of {name}")
        if tuple(records[0]["shape"]) != piece.info.shape:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {records[0]['shape']}, the model needs {list(piece.info.shape)}"
            )
        memory[region.numel :].zero_()
        copied = 0
        for record in records:
            source = Region.from_json(record["region"])
            if _apart(region, source):
                continue
            copied += copy_overlap(memory, region, self._tensor(record).to(memory.device), source)
        if copied != region.numel:
            raise CheckpointError(f"{self.folder}: {kind} of {name} is incomplete ({copied} of {region.numel} elements found)")


def _apart(a: Region, b: Region) -> bool:
    def box(region: Region) -> tuple[int, int, int, int]:
        blocks = region.blocks
        return (
            min(x.row for x in blocks), max(x.row + x.rows for x in blocks),
            min(x.col for x in blocks), max(x.col + x.cols for x in blocks),
        )  # fmt: skip

    if not a.blocks or not b.blocks:
        return True
    one, two = box(a), box(b)
    return one[1] <= two[0] or two[1] <= one[0] or one[3] <= two[2] or two[3] <= one[2]


def load_weights(reader: CheckpointReader, store: ParameterStore) -> None:
    """Fill the store's weights.

    Raises:
        CheckpointError: names are missing, unexpected or misshaped; all are listed.
    """
    entries = [*store.entries, *store.frozen]
    needed = {piece.info.name: piece.info.shape for entry in entries for piece in entry.pieces}
    if not store.sharded:
        compare_names(reader, needed)
    with torch.no_grad():
        for entry in entries:
            flat = entry.tensor.detach().reshape(-1)
            for piece in entry.pieces:
                reader.fill(WEIGHT, piece, flat[piece.start : piece.start + piece.length])
    store.publish()


def compare_names(reader: CheckpointReader, needed: dict[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError, listing all differences, when a checkpoint's weights are not the model's."""
    found = reader.names()
    problems = [f"missing {name}" for name in sorted(set(needed) - found)]
    problems += [f"unexpected {name}" for name in sorted(found - set(needed))]
    problems += [
        f"{name} is {list(reader.shape(name))} instead of {list(needed[name])}"
        for name in sorted(found & set(needed))
        if reader.shape(name) != needed[name]
    ]
    if problems:
        more = f" and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise CheckpointError(f"{reader.folder} is of another model: {'; '.join(problems[:12])}{more}")


def load_optimizer(reader: CheckpointReader, store: ParameterStore, optimizer: torch.optim.Optimizer) -> None:
    """Fill the optimizer's state, its moments as pieces and its counters from `state.json`."""
    scalars = reader.state.get("optimizer_scalars", {})
    kinds = sorted({kind for kind, _ in reader.pieces if kind != WEIGHT})
    for entry in store.entries:
        state: dict[str, Any] = {}
        if entry.pieces:
            saved = scalars.get(entry.pieces[0].info.name, {})
            state.update({kind: torch.tensor(value, dtype=torch.float32) for kind, value in saved.items()})
            for kind in kinds:
                if (kind, entry.pieces[0].info.name) not in reader.pieces:
                    continue
                values = torch.zeros_like(entry.tensor)
                flat = values.view(-1)
                for piece in entry.pieces:
                    reader.fill(kind, piece, flat[piece.start : piece.start + piece.length])
                state[kind] = values
        if state:
            optimizer.state[entry.tensor] = state


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of the complete checkpoints in a folder, by step as a number."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.match(path.name)
        if match and (path / "manifest.json").is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run's `checkpoints` folder, or None."""
    found = complete_checkpoints(folder)
    return found[-1][1] if found else None


def prune(folder: Path, keep: int, best: str | None) -> None:
    """Remove all but the newest `keep` checkpoints, the best one and the leftovers of interrupted saves."""
    found = complete_checkpoints(folder)
    for _, path in found[: max(0, len(found) - max(1, keep))]:
        if path.name != best:
            doomed = path.with_name(path.name + ".removed")
            os.replace(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    for path in folder.glob("step_*.part"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("step_*.removed"):
        shutil.rmtree(path, ignore_errors=True)
