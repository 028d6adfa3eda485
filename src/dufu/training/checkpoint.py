"""Checkpoints: complete or absent, in any layout's pieces, readable into any other layout. Loading executes nothing.

A checkpoint is a folder: `rank_00000.safetensors` … hold flat pieces of the weights and the optimizer's state; `index.json` says which
rectangle of which tensor each piece is; `state.json` holds everything else; `config.yaml` the effective config; `manifest.json` the size
and sha256 of every file. It is written under another name, synced, and renamed when complete; `latest` moves last.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dufu.errors import CheckpointError
from dufu.interchange.files import digest
from dufu.interchange.folder import is_folder
from dufu.interchange.source import WEIGHT, WeightSource, fill_piece, matches, refuse_names
from dufu.optim import WholeParameterOptimizer
from dufu.parallel.parameters import Entry, Piece
from dufu.parallel.region import Region, copy_overlap
from dufu.parallel.store import ParameterStore

FORMAT = 1
AVERAGE = "ema"
_STEP = re.compile(r"^step_(\d+)$")


def step_folder(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step_{step:07d}"


def holdings(
    store: ParameterStore, optimizer: torch.optim.Optimizer | None, averages: Sequence[Tensor] = ()
) -> Iterator[tuple[str, Entry, Tensor]]:
    """Yield (kind, entry, values) of the weights, of their averages and of the optimizer's tensors.

    Args:
        averages: one for each trained entry, where a run keeps them.

    Raises:
        CheckpointError: the optimizer keeps a tensor that is not of its weight's size.
    """
    for entry in (*store.entries, *(store.frozen if store.saves_frozen else ())):
        yield WEIGHT, entry, entry.tensor.detach()
    for entry, values in zip(store.entries, averages):
        yield AVERAGE, entry, values
    if optimizer is None:
        return
    for entry in store.entries:
        for kind, value in optimizer.state.get(entry.tensor, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            if value.numel() != entry.tensor.numel():
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {kind} of shape {list(value.shape)} for a weight of shape "
                    f"{list(entry.tensor.shape)}; a checkpoint holds numbers and tensors of the weight's own size only"
                )
            yield kind, entry, value


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
        version, files = manifest.get("format"), manifest.get("files")
        if isinstance(version, int) and version > FORMAT:
            raise CheckpointError(
                f"{self.folder}: checkpoint format {version}; this dufu reads format {FORMAT}, a newer one wrote it"
            )
        if version != FORMAT or not isinstance(files, dict) or not {"state.json", "index.json"} <= set(files):
            raise CheckpointError(f"{self.folder}/manifest.json: not the manifest of a dufu checkpoint")
        self._files = set(files)
        for name, expected in files.items():
            path = self.folder / name
            if not path.is_file():
                raise CheckpointError(f"{path}: missing, though the manifest names it; the checkpoint is incomplete")
            if path.stat().st_size != expected["bytes"]:
                raise CheckpointError(f"{path}: {path.stat().st_size} bytes instead of {expected['bytes']}; it is damaged")
            if verify and digest(path)["sha256"] != expected["sha256"]:
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
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{path}: missing; {self.folder} is no complete checkpoint") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: not a JSON object")
        return value

    def names(self) -> set[str]:
        """Return the names of the saved weights."""
        return {name for kind, name in self.pieces if kind == WEIGHT}

    def has(self, kind: str) -> bool:
        """Say whether anything of a kind was saved."""
        return any(found == kind for found, _ in self.pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a saved weight."""
        return tuple(self.pieces[WEIGHT, name][0]["shape"])

    def dtype(self, kind: str, entry: Entry) -> torch.dtype:
        """Return the type of an optimizer's state: float32 where it was saved so, otherwise that of the weights."""
        records = self.pieces.get((kind, entry.pieces[0].info.name), ())
        return torch.float32 if any(r["dtype"] == "float32" for r in records) else entry.tensor.dtype

    def _tensor(self, record: dict[str, Any]) -> Tensor:
        file = record["file"]
        if file not in self._files:
            raise CheckpointError(f"{self.folder}/index.json: names {file}, which the manifest does not know")
        if file not in self._open:
            try:
                # As numpy it copies one tensor at a time; as PyTorch it would map every file whole, as memory that may be written to.
                self._open[file] = safe_open(str(self.folder / file), framework="np")
            except SafetensorError as error:
                raise CheckpointError(f"{self.folder / file}: not a safetensors file ({error})") from error
        try:
            tensor = torch.from_numpy(self._open[file].get_tensor(record["key"]))
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder / file}: {error}") from error
        return tensor

    def fill(self, kind: str, piece: Piece, memory: Tensor) -> None:
        """Fill a piece's stretch of flat memory with what the checkpoint holds of it; padding becomes zero.

        Raises:
            CheckpointError: the shapes differ or a part is missing.
        """
        memory[piece.region.numel :].zero_()
        self.read(piece.info.name, piece.info.shape, piece.region, memory, kind)

    def read(self, name: str, shape: tuple[int, ...], region: Region, memory: Tensor, kind: str = WEIGHT) -> None:
        """Fill flat memory with a region of a parameter, or of what the optimizer keeps of it.

        Raises:
            CheckpointError: the shapes differ or a part is missing.
        """
        records = self.pieces.get((kind, name))
        if records is None:
            raise CheckpointError(f"{self.folder}: holds no {kind} of {name}")
        if tuple(records[0]["shape"]) != shape:
            raise CheckpointError(f"{self.folder}: {name} has shape {records[0]['shape']}, the model needs {list(shape)}")
        copied = 0
        for record in records:
            source = Region.from_json(record["region"])
            if _apart(region, source):
                continue
            copied += copy_overlap(memory, region, self._tensor(record).to(memory.device), source)
        if copied != region.numel:
            raise CheckpointError(f"{self.folder}: {kind} of {name} is incomplete ({copied} of {region.numel} elements found)")

    def compare(
        self, shapes: Mapping[str, tuple[int, ...]], allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = ()
    ) -> set[str]:
        """See WeightSource."""
        found = self.names()
        lacking = {name for name in set(shapes) - found if matches(name, allow_missing)}
        problems = [f"missing {name}" for name in sorted(set(shapes) - found - lacking)]
        problems += [f"unexpected {name}" for name in sorted(found - set(shapes)) if not matches(name, allow_unexpected)]
        problems += [
            f"{name} is {list(self.shape(name))} instead of {list(shapes[name])}"
            for name in sorted(found & set(shapes))
            if self.shape(name) != shapes[name]
        ]
        refuse_names(self.folder, problems)
        return lacking

    def fill_named(self, kind: str, name: str, memory: Tensor) -> None:
        """Fill a tensor that is saved whole, of a shape of its own.

        Raises:
            CheckpointError: there is none, or of another shape.
        """
        records = self.pieces.get((kind, name))
        if records is None or records[0]["shape"] != list(memory.shape):
            found = "nothing" if records is None else f"shape {records[0]['shape']}"
            raise CheckpointError(
                f"{self.folder}: {kind} of {name} should have shape {list(memory.shape)}, the checkpoint holds {found}"
            )
        memory.copy_(self._tensor(records[0]).view(memory.shape))


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


def load_weights(
    source: WeightSource,
    store: ParameterStore,
    averaged: bool = False,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
) -> set[str]:
    """Fill the store's weights.

    Args:
        averaged: take the averages of those that were trained.
        allow_missing: patterns of names that may be missing; they keep their initial weights.
        allow_unexpected: patterns of names that may be left over.

    Returns:
        The names that were missing by permission.

    Raises:
        CheckpointError: names are missing, unexpected or misshaped (all are listed), or there are no averages.
    """
    lacking = source.compare(store.shapes, allow_missing, allow_unexpected)
    own = getattr(source, "reader", source)  # of a source that adds base weights to a checkpoint
    reader = own if isinstance(own, CheckpointReader) else None
    if averaged and (reader is None or not reader.has(AVERAGE)):
        raise CheckpointError(f"{source.folder}: holds no averaged weights; set train.ema.enabled=false")
    with torch.no_grad():
        for entry in (*store.entries, *store.frozen):
            flat = entry.tensor.detach().reshape(-1)
            for piece in entry.pieces:
                memory = flat[piece.start : piece.start + piece.length]
                if piece.info.name in lacking:
                    continue
                if averaged and reader is not None and (AVERAGE, piece.info.name) in reader.pieces:
                    reader.fill(AVERAGE, piece, memory)
                else:
                    fill_piece(source, piece, memory)
    store.publish()
    return lacking


def load_optimizer(reader: CheckpointReader, store: ParameterStore, optimizer: torch.optim.Optimizer) -> None:
    """Fill the optimizer's state, its moments as pieces and its counters from `state.json`.

    Raises:
        CheckpointError: a parameter lacks what others have; moments never start afresh without a word.
    """
    scalars = reader.state.get("optimizer_scalars", {})
    named = optimizer.named_state() if isinstance(optimizer, WholeParameterOptimizer) else {}
    for kind, tensors in named.items():
        for name, tensor in tensors.items():
            reader.fill_named(kind, name, tensor)
    kinds = sorted({kind for kind, _ in reader.pieces if kind not in (WEIGHT, AVERAGE, *named)})
    fused = {id(p) for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    for entry in store.entries:
        if not entry.pieces:
            continue
        device = entry.tensor.device if id(entry.tensor) in fused else "cpu"
        saved = scalars.get(entry.pieces[0].info.name, {})
        state: dict[str, Any] = {kind: torch.tensor(value, dtype=torch.float32, device=device) for kind, value in saved.items()}
        for kind in kinds:
            make = torch.empty_like if entry.unsharded else torch.zeros_like  # between the pieces of a shard there may be padding
            values = make(entry.tensor, dtype=reader.dtype(kind, entry))
            flat = values.view(-1)
            for piece in entry.pieces:
                reader.fill(kind, piece, flat[piece.start : piece.start + piece.length])
            state[kind] = values
        if state:
            optimizer.state[entry.tensor] = state


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of the checkpoints in a folder, by step as a number. What an interrupted save left has another name."""
    found = [(_STEP.match(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ())]
    return sorted((int(match[1]), path) for match, path in found if match)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run's `checkpoints` folder, or None."""
    found = checkpoints_in(folder)
    return found[-1][1] if found else None


def find_checkpoint(folder: str | Path) -> Path:
    """Return the checkpoint that a path names: itself, or the newest of a run's folder.

    Raises:
        CheckpointError: there is no complete one.
    """
    path = Path(folder)
    if (path / "manifest.json").is_file():
        return path
    found = latest_checkpoint(path / "checkpoints") or latest_checkpoint(path)
    if found is not None:
        return found
    if is_folder(path):
        raise CheckpointError(f"{path}: a Hugging Face folder, not a checkpoint of dufu")
    raise CheckpointError(
        f"{path}: neither a run's folder nor a checkpoint (no complete checkpoint in {path}/checkpoints), nor a Hugging Face folder"
    )


def find_weights(folder: str | Path) -> Path:
    """Return the checkpoint that a path names, as `find_checkpoint`, or a Hugging Face folder.

    Raises:
        CheckpointError: it is neither.
    """
    path = Path(folder)
    return path if is_folder(path) and not (path / "checkpoints").is_dir() else find_checkpoint(path)


def prune(folder: Path, keep: int, best: str | None) -> None:
    """Remove all but the newest `keep` checkpoints, the best one and the leftovers of interrupted saves."""
    found = checkpoints_in(folder)
    for _, path in found[: max(0, len(found) - keep)]:
        if path.name != best:
            os.replace(path, path.with_name(f"{path.name}.removed"))
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what interrupted saves left behind."""
    for pattern in ("step_*.part", "step_*.removed"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".*.part*"):
        path.unlink(missing_ok=True)
