"""ZeRO (Rajbhandari et al., 2020): optimizer state, gradients and weights sharded over the data-parallel processes.

The parameters of a unit that share optimizer settings lie one after another in a flat buffer, padded to a multiple of the number of
processes; each process owns one equal stretch. The model's parameters are views of the buffer, so an all-gather into it needs no copy.

stage 1  the buffer stays; after the last micro-batch gradients are summed once, each process keeping its stretch.
stage 2  gradients are summed after each micro-batch, unit by unit during backward, so that no process holds them all.
stage 3  the buffer is emptied after a unit's forward and filled again before its backward.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dufu.parallel import faults
from dufu.parallel.collectives import Communicator
from dufu.parallel.order import GradientOrder
from dufu.parallel.parameters import Entry, ParameterInfo, Piece, fill, give_memory
from dufu.parallel.store import Options


class FlatShard:
    """One flat buffer and this process's stretch of it."""

    def __init__(
        self,
        infos: list[ParameterInfo],
        options: Options,
        data: Communicator,
        device: torch.device,
        dtype: torch.dtype,
        master: bool,
        seed: int,
    ) -> None:
        self.infos, self.data, self.dtype = infos, data, dtype
        self.trained = infos[0].parameter.requires_grad
        self.offsets: list[int] = []
        total = 0
        for info in infos:
            self.offsets.append(total)
            total += info.parameter.numel()
        self.stretch = -(-total // data.size)
        low, high = data.rank * self.stretch, (data.rank + 1) * self.stretch
        values = torch.zeros(self.stretch, dtype=torch.float32, device=device)
        pieces: list[Piece] = []
        for info, offset in zip(infos, self.offsets):
            start, stop = max(low, offset), min(high, offset + info.parameter.numel())
            if start < stop:
                region = info.region.cut(start - offset, stop - offset)
                piece = Piece(info, region, start - low, stop - start)
                pieces.append(piece)
                fill(info, seed, values[piece.start : piece.start + piece.length], region)
        if not master:
            values = values.to(dtype)
        self.entry = Entry(nn.Parameter(values, requires_grad=self.trained), pieces, options, infos[0].divided, unsharded=False)
        self.full = torch.empty(self.stretch * data.size, dtype=dtype, device=device)
        self.resident = True
        self._kept: Tensor | None = None  # stage 1, half precision: float32 gradients of the micro-batches so far
        for info, offset in zip(infos, self.offsets):
            shape = info.local_shape
            give_memory(info, torch.empty(0, dtype=dtype, device=device))
            # Through `.data` the parameter keeps a version counter of its own: filling the buffer again is no change of it.
            info.parameter.data = self.full[offset : offset + math.prod(shape)].view(shape)

    def gather(self) -> None:
        """Fill the buffer from every process's stretch."""
        with torch.no_grad():
            self.data.gather_into(self.full, self.entry.tensor.detach().to(self.dtype))
        self.resident = True

    def ensure(self) -> None:
        """Fill the buffer if it is empty."""
        if not self.resident:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            self.gather()

    def release(self) -> None:
        """Empty the buffer; the parameters have no values until `ensure`."""
        if self.resident:
            self.full.untyped_storage().resize_(0)
            self.resident = False

    def reduce(self) -> None:
        """Sum the parameters' gradients over the processes, add this process's stretch to the entry's, and free them."""
        part = self.data.reduce_scatter(self._take_gradients(), self.entry.tensor.dtype)
        if faults.active("shard.scale"):
            part = part * 0.5
        tensor = self.entry.tensor
        tensor.grad = part if tensor.grad is None else tensor.grad.add_(part)

    def _take_gradients(self) -> Tensor:
        """Return the parameters' gradients as one flat tensor, and free them."""
        flat = torch.zeros(self.full.numel(), dtype=self.dtype, device=self.full.device)
        for info, offset in zip(self.infos, self.offsets):
            if info.parameter.grad is not None:
                flat[offset : offset + info.parameter.numel()].copy_(info.parameter.grad.reshape(-1))
                info.parameter.grad = None
        if self._kept is not None:
            flat, self._kept = self._kept.add_(flat), None
        return flat

    def keep_gradients(self) -> None:
        """Add the micro-batch's half-precision gradients up in float32, where the entry is float32: they are reduced later."""
        if self.dtype != self.entry.tensor.dtype:
            self._kept = self._take_gradients().to(self.entry.tensor.dtype)

    def forget_gradients(self) -> None:
        """Drop what was kept."""
        self._kept = None


class ShardedParameters:
    """Parameters sharded over the data-parallel processes; the arguments are those of WholeParameters, and the stage and units."""

    sharded = True

    def __init__(
        self,
        infos: list[ParameterInfo],
        options: dict[nn.Parameter, Options],
        data: Communicator,
        device: torch.device,
        compute_dtype: torch.dtype,
        master: bool,
        seed: int,
        stage: int,
        units: dict[str, nn.Module],
    ) -> None:
        self.infos, self.data, self.stage = infos, data, stage
        groups: dict[tuple[Any, ...], list[ParameterInfo]] = {}
        order = [u for u in reversed(units) if any(i.unit == u for i in infos)] + ["shared"]
        for unit in order:
            for info in infos:
                if info.unit == unit:
                    settings = json.dumps(options.get(info.parameter, {}), sort_keys=True, default=str)
                    key = (unit, settings, info.divided, info.parameter.requires_grad)
                    groups.setdefault(key, []).append(info)
        self.flats: list[FlatShard] = []
        for group in groups.values():
            flat = FlatShard(group, options.get(group[0].parameter, {}), data, device, compute_dtype, master, seed)
            if stage == 3:
                flat.release()
            else:
                flat.gather()
            self.flats.append(flat)
        self.entries = [flat.entry for flat in self.flats if flat.trained]
        self.frozen = [flat.entry for flat in self.flats if not flat.trained]
        self._trained = [flat for flat in self.flats if flat.trained]
        self._order = GradientOrder([[i.parameter for i in flat.infos] for flat in self._trained], self._reduce)
        if stage == 3:
            self._install(units)

    def _install(self, units: dict[str, nn.Module]) -> None:
        last = list(units)[-1]
        for name, unit in units.items():
            held = set(unit.parameters())
            mine = [flat for flat in self.flats if any(info.parameter in held for info in flat.infos)]
            unit.register_forward_pre_hook(_before(mine))
            unit.register_forward_hook(_after(mine, keep=name == last), always_call=True)

    def start_micro_batch(self, last: bool) -> None:
        """See ParameterStore."""
        if self.stage > 1 or last:
            self._order.arm()

    def _reduce(self, number: int) -> None:
        flat = self._trained[number]
        flat.reduce()
        if self.stage == 3:
            flat.release()

    def end_micro_batch(self) -> None:
        """See ParameterStore."""
        if self._order.armed:
            self._order.complete()
        elif self.stage == 1:
            for flat in self._trained:
                flat.keep_gradients()
        if self.stage == 3:
            for flat in self.flats:
                flat.release()

    def finish(self) -> None:
        """See ParameterStore."""
        for entry in self.entries:
            if entry.tensor.grad is None:
                entry.tensor.grad = torch.zeros_like(entry.tensor)

    def publish(self) -> None:
        """See ParameterStore."""
        if self.stage == 3:
            for flat in self.flats:
                flat.release()
        else:
            for flat in self.flats:
                flat.gather()

    def zero_grad(self) -> None:
        """See ParameterStore."""
        for flat in self.flats:
            flat.entry.tensor.grad = None
            flat.forget_gradients()
        for info in self.infos:
            info.parameter.grad = None


def _before(flats: list[FlatShard]) -> Callable[..., None]:
    def hook(unit: nn.Module, inputs: Any) -> None:
        for flat in flats:
            flat.ensure()

    return hook


def _after(flats: list[FlatShard], keep: bool) -> Callable[..., None]:
    def hook(unit: nn.Module, inputs: Any, output: Any) -> None:
        training = torch.is_grad_enabled()
        if not (keep and training):
            for flat in flats:
                flat.release()
        if training:
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(_filled(flats))

    return hook


def _filled(flats: list[FlatShard]) -> Callable[[Tensor], None]:
    def hook(grad: Tensor) -> None:
        for flat in flats:
            flat.ensure()

    return hook


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return []
