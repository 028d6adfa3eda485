"""Runs that train adapters alone: their checkpoints, and the base weights that belong to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from dufu.config.instantiate import instantiate
from dufu.errors import CheckpointError, ConfigError
from dufu.interchange.source import WeightSource
from dufu.layers.random import mix_, stable_hash
from dufu.models.lora import MAGNITUDE, A, B, Lora, Site, is_adapter
from dufu.models.names import Shape
from dufu.parallel.build import Distributed
from dufu.parallel.region import Block, Region, as_matrix, copy_overlap, whole_region
from dufu.training.checkpoint import AVERAGE, WEIGHT, CheckpointReader
from dufu.training.peft_folder import settle

_GOLDEN = -7046029254386353131  # an odd number of 64 bits, as in layers/random.py
_CHUNK = 1 << 22  # numbers at a time


def adapter_of(config: DictConfig) -> Lora | None:
    """Return the adapters that a config asks for."""
    call = config.train.get("adapter")
    if call is None:
        return None
    found = instantiate(call)
    if not isinstance(found, Lora):
        raise ConfigError(f"train.adapter: {type(found).__name__} is no adapter; name lora")
    if found.folder is not None:
        settle(found, config)
    return found


def fingerprint(distributed: Distributed, saved: Collection[str] = ()) -> str:
    """Return a fingerprint of the frozen weights: the same in every layout; called by every process.

    Args:
        saved: those that a checkpoint holds, and that are left out.

    It is a sum of integers, the numbers as bf16 times numbers that their places give, so that no order of summing changes it.
    """
    total = torch.zeros((), dtype=torch.int64)
    for entry in distributed.store.frozen:
        if not entry.counted:
            continue
        flat = entry.tensor.detach().reshape(-1)
        for piece in entry.pieces:
            if piece.info.name in saved:
                continue
            memory = flat[piece.start : piece.start + piece.region.numel]
            cols = as_matrix(piece.info.shape)[1]
            for block, values in piece.region.views(memory):
                total += _sum(piece.info.name, cols, block, values)
    total = total.to(distributed.processes.device)
    distributed.processes.world.sum_(total)
    return f"{int(total) & 0xFFFFFFFFFFFFFFFF:016x}"


def _sum(name: str, cols: int, block: Block, values: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64)
    step = max(1, _CHUNK // max(1, block.cols))
    start = stable_hash("fingerprint", name)
    for row in range(0, block.rows, step):
        part = values[row : row + step]
        bits = part.to(torch.bfloat16).contiguous().view(torch.int16).to(torch.int64).cpu()
        rows = torch.arange(block.row + row, block.row + row + len(part)) * cols
        places = rows[:, None] + torch.arange(block.col, block.col + block.cols)
        total += (bits * (mix_(places * _GOLDEN + start) | 1)).sum()
    return total


def compare_base(reader: CheckpointReader, distributed: Distributed) -> None:
    """Raise CheckpointError where the frozen weights are not those that a checkpoint's adapters were trained with."""
    known = reader.state.get("adapter")
    if known is None or "float16" in str({entry.tensor.dtype for entry in distributed.store.frozen}).replace("bfloat16", ""):
        return
    found = fingerprint(distributed, reader.names())
    if found != known["base"]:
        raise CheckpointError(
            f"{reader.folder}: its adapters were trained with other base weights than train.load_weight={known['from']!r} holds now "
            f"(fingerprint {known['base']}, now {found})"
        )


class AdaptedSource:
    """A checkpoint of adapters, and the base weights: side by side for a model that has adapters, else added together.

    Args:
        reader: the checkpoint.
        base: None = the weights that the seed gives.
        sites: the adapted layers, by their names.
        averaged: whether averages are added instead, where there are some.
    """

    def __init__(
        self, reader: CheckpointReader, base: WeightSource | None, sites: Mapping[str, Site], averaged: bool = False
    ) -> None:
        self.reader, self.base, self.sites, self.averaged = reader, base, sites, averaged
        self.folder = reader.folder
        self._merged = False

    def compare(
        self, shapes: Mapping[str, Shape], allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = ()
    ) -> set[str]:
        """See WeightSource."""
        saved = self.reader.names()
        self._merged = not any(is_adapter(name) for name in shapes)
        own = {name for name in shapes if name in saved or is_adapter(name)}
        absent = tuple(name for name in saved if is_adapter(name)) if self._merged else ()
        lacking = self.reader.compare({n: shapes[n] for n in own}, allow_missing, (*allow_unexpected, *absent))
        rest = {name: shape for name, shape in shapes.items() if name not in own}
        if self.base is None:
            if self._merged:
                raise CheckpointError(f"{self.folder}: its adapters lie beside random weights, to which they cannot be added")
            return lacking | set(rest)
        return lacking | self.base.compare(dict(rest), (*allow_missing, *own), allow_unexpected)

    def read(self, name: str, shape: Shape, region: Region, memory: Tensor) -> None:
        """See WeightSource."""
        if name in self.reader.names():
            self.reader.read(name, shape, region, memory)
            return
        assert self.base is not None
        site = self.sites.get(name.removesuffix(".weight")) if self._merged and name.endswith(".weight") else None
        if site is None:
            self.base.read(name, shape, region, memory)
            return
        for block, out in region.views(memory):
            out.copy_(self._merge(site, name, shape, block))

    def saved(self, site: Site, leaf: str) -> Tensor:
        """Return one of an adapted layer's parameters."""
        name = f"{site.name}.{leaf}"
        shape = self.reader.shape(name)
        values = torch.empty(shape)
        kind = AVERAGE if self.averaged and (AVERAGE, name) in self.reader.pieces else WEIGHT
        self.reader.read(name, shape, whole_region(shape), values.view(-1), kind)
        return values

    def _merge(self, site: Site, name: str, shape: Shape, block: Block) -> Tensor:
        """Return a rectangle of W + scale · B A, with DoRA's magnitudes."""
        assert self.base is not None
        a, b = self.saved(site, A), self.saved(site, B)
        dora = f"{site.name}.{MAGNITUDE}" in self.reader.names()
        rows, cols = as_matrix(shape)
        turned = site.form.turned
        if dora:  # an output feature's norm needs all its inputs
            wanted = Block(0, rows, block.col, block.cols) if turned else Block(block.row, block.rows, 0, cols)
        else:
            wanted = block
        weight = torch.empty(wanted.rows, wanted.cols)
        self.base.read(name, shape, Region((wanted,)), weight.view(-1))
        if turned:
            weight = weight.t()
        first_out, first_in = (wanted.col, wanted.row) if turned else (wanted.row, wanted.col)
        change = torch.zeros_like(weight)
        grown = torch.zeros(len(weight))
        for number, row, length, start in site.stretches():
            low, high = max(first_out, row), min(first_out + len(weight), row + length)
            if low >= high:
                continue
            own_a = a[number * site.rank : (number + 1) * site.rank, first_in : first_in + weight.shape[1]]
            change[low - first_out : high - first_out] = site.scale * (b[start + low - row : start + high - row] @ own_a)
            if dora:
                grown[low - first_out : high - first_out] = self.saved(site, MAGNITUDE)[start + low - row : start + high - row]
        if dora:
            base = weight.norm(dim=1)
            weight = weight + change
            weight = weight * ((base + grown) / weight.norm(dim=1))[:, None]
        else:
            weight = weight + change
        weight = weight.t() if turned else weight
        return weight[
            block.row - wanted.row : block.row - wanted.row + block.rows,
            block.col - wanted.col : block.col - wanted.col + block.cols,
        ]


class BaseSource:
    """Base weights for a model that has adapters.

    Args:
        base: the weights.
        begun: what the adapters begin with; {} = as they are made.
    """

    def __init__(self, base: WeightSource, begun: Mapping[str, Tensor]) -> None:
        self.base, self.folder, self.begun = base, base.folder, begun

    def compare(
        self, shapes: Mapping[str, Shape], allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = ()
    ) -> set[str]:
        """See WeightSource."""
        adapters = {name for name in shapes if is_adapter(name)}
        rest = {name: shape for name, shape in shapes.items() if name not in adapters}
        return (adapters - set(self.begun)) | self.base.compare(rest, allow_missing, allow_unexpected)

    def read(self, name: str, shape: Shape, region: Region, memory: Tensor) -> None:
        """See WeightSource."""
        if name in self.begun:
            copy_overlap(memory, region, self.begun[name].reshape(-1).to(memory.device), whole_region(shape))
        else:
            self.base.read(name, shape, region, memory)


def sites_of(config: DictConfig) -> dict[str, Site]:
    """Return the layers that a config's adapters adapt; the model is described only."""
    adapter = adapter_of(config)
    assert adapter is not None
    with torch.device("meta"):
        model = instantiate(config.model)
    adapter.apply(model)
    return adapter.sites


def base_facts(config: DictConfig, distributed: Distributed) -> dict[str, Any]:
    """Return what a checkpoint of adapters says of the weights that it does not hold, nothing of another run; called by every process."""
    if adapter_of(config) is None:
        return {}
    return {"base": fingerprint(distributed), "from": str(config.train.load_weight or "")}


def missing_base(folder: Path, where: str) -> CheckpointError:
    """Return the error of base weights that are gone."""
    return CheckpointError(
        f"{folder} holds adapters only, and the weights they belong to are not at {where}; give their place with train.load_weight=FOLDER"
    )


__all__ = [
    "AdaptedSource", "BaseSource", "adapter_of", "base_facts", "compare_base", "fingerprint", "missing_base", "sites_of",
]  # fmt: skip
