"""ZeRO (Rajbhandari et al., 2020): optimizer state, gradients and weights sharded over the data-parallel processes.

The parameters of a unit that share optimizer settings lie one after another in a flat buffer, padded to a multiple of the number of
processes; each process owns one equal stretch. The model's parameters are views of the buffer, so an all-gather into it needs no copy.

stage 1  the buffer stays; after the last micro-batch gradients are summed once, each process keeping its stretch.
stage 2  gradients are summed after each micro-batch, unit by unit during backward, so that no process holds them all.
stage 3  the buffer is emptied after a unit's forward and filled again before its backward.

With stage 3 every third unit's buffers lie in the same memory: at most neighbours are at work at one time, and memory that stays is not
asked for anew at each step (which costs time, and with glibc before 2.38 leaves holes that nothing fits into).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dufu.errors import DufuError
from dufu.parallel import faults
from dufu.parallel.order import GradientOrder
from dufu.parallel.parameters import Entry, ParameterInfo, Piece, fill, give_memory, is_first, spread_of
from dufu.parallel.process import Processes
from dufu.parallel.store import Completion, Options, Ties, chunk_of, in_order_of_backward, message_of

_TURNS = 3  # units whose buffers lie in memory of their own: the one at work, and one on each side


class Arena:
    """Memory for one flat buffer at a time.

    Args:
        numel, dtype, device: of the memory.
        taken_in_turns: whether several buffers use it, one after the other; otherwise an empty one gives its memory back.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, taken_in_turns: bool) -> None:
        self.memory = torch.empty(numel, dtype=dtype, device=device)
        self.taken_in_turns = taken_in_turns
        self.holder: FlatShard | None = None
        self.content: FlatShard | None = None  # whose values the memory still has

    def take(self, flat: FlatShard) -> None:
        """Let a buffer have the memory; one that has it becomes empty."""
        if self.holder is not None and self.holder.at_work:
            raise DufuError(
                f"ZeRO-3: {flat.infos[0].name} is needed while {self.holder.infos[0].name} is at work; units of the chain run one after "
                f"the other, not inside each other; use train.zero_optimization.stage=2"
            )
        if self.holder is None and not self.taken_in_turns:
            self.memory.untyped_storage().resize_(self.memory.numel() * self.memory.element_size())
        self.holder = flat
        if self.content is not flat:
            self.content = None

    def leave(self) -> None:
        """Give the memory up."""
        self.holder = None
        if not self.taken_in_turns:
            self.memory.untyped_storage().resize_(0)
            self.content = None


class Scratch:
    """Memory in which gradients are put together before they travel, and in which they arrive: one buffer's at a time."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, what: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `numel` elements; what was taken before under the same name is lost."""
        held = self._held.get((what, dtype))
        if held is None or held.numel() < numel:
            held = self._held[what, dtype] = torch.empty(numel, dtype=dtype, device=device)
        return held[:numel]


class FlatShard:
    """One flat buffer and this process's stretch of it.

    Args:
        infos: parameters that lie in it, alike in everything that matters to how they are summed.
        options: the optimizer's settings for them.
        processes: of the layout.
        dtype: of the buffer.
        master: whether the stretch is float32 whatever the buffer is.
        completion: the sums of the gradient beyond the replicas.
        scratch: where gradients are put together.
        arena: where the buffer lies; None = in memory of its own.
    """

    def __init__(
        self,
        infos: list[ParameterInfo],
        options: Options,
        processes: Processes,
        dtype: torch.dtype,
        master: bool,
        seed: int | None,
        completion: Completion,
        scratch: Scratch,
        arena: Arena | None = None,
    ) -> None:
        spread, device = spread_of(infos[0], processes), processes.device
        data = spread.shard
        self.infos, self.data, self.dtype, self.completion, self.scratch = infos, data, dtype, completion, scratch
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
        self.entry = Entry(
            nn.Parameter(values, requires_grad=self.trained), pieces, options, infos[0].divided, unsharded=False,
            spread=spread, first=is_first(infos[0], processes),
        )  # fmt: skip
        self.arena = arena or Arena(self.stretch * data.size, dtype, device, taken_in_turns=False)
        self.full = self.arena.memory[: self.stretch * data.size]
        self.at_work = False  # between the beginning of a forward and its end
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
        self.arena.content = self

    @property
    def resident(self) -> bool:
        """Say whether the parameters have values."""
        return self.arena.holder is self

    def ensure(self) -> None:
        """Fill the buffer if it is empty."""
        if not self.resident:
            self.arena.take(self)
            if self.arena.content is not self:
                self.gather()

    def release(self) -> None:
        """Empty the buffer; the parameters have no values until `ensure`."""
        self.at_work = False
        if self.resident:
            self.arena.leave()

    def reduce(self) -> None:
        """Sum the parameters' gradients over the processes, add this process's stretch to the entry's, and free them."""
        flat = self._take_gradients()
        received = self.scratch.take("received", flat.numel(), flat.dtype, flat.device)
        part = self.data.reduce_scatter(flat, self.entry.tensor.dtype, received)
        if faults.active("shard.scale"):
            part = part * 0.5
        tensor = self.entry.tensor
        tensor.grad = part if tensor.grad is None else tensor.grad.add_(part)

    def _take_gradients(self) -> Tensor:
        """Return the parameters' gradients as one flat tensor in scratch memory, and free them."""
        flat = self.scratch.take("sent", self.full.numel(), self.dtype, self.full.device)
        end = 0
        for info, offset in zip(self.infos, self.offsets):
            end = offset + info.parameter.numel()
            if info.parameter.grad is None:
                flat[offset:end].zero_()
            else:
                flat[offset:end].copy_(info.parameter.grad.reshape(-1))
                info.parameter.grad = None
        flat[end:].zero_()
        if self._kept is not None:
            flat, self._kept = self._kept.add_(flat), None
        return flat

    def keep_gradients(self) -> None:
        """Add the micro-batch's half-precision gradients up in float32, where the entry is float32: they are reduced later."""
        if self.dtype != self.entry.tensor.dtype:
            self._kept = self._take_gradients().to(self.entry.tensor.dtype)

    def complete(self) -> None:
        """Finish the gradient: zeros where nothing was reduced, and the sums beyond the processes that share the buffer."""
        tensor = self.entry.tensor
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        self.entry.spread.repeat.sum_(tensor.grad)
        self.completion.sum_(tensor.grad)

    def forget_gradients(self) -> None:
        """Drop what was kept."""
        self._kept = None


class ShardedParameters:
    """Parameters sharded over the replicas; the arguments are those of WholeParameters, and the stage and the units by name."""

    sharded = True
    saves_frozen = True

    def __init__(
        self,
        infos: list[ParameterInfo],
        options: dict[nn.Parameter, Options],
        processes: Processes,
        compute_dtype: torch.dtype,
        master: bool,
        seed: int | None,
        chunks: Sequence[Sequence[str]],
        ties: Ties,
        stage: int,
        units: dict[str, nn.Module],
    ) -> None:
        self.infos, self.stage = infos, stage
        self.shapes = {info.name: info.shape for info in infos}
        groups: dict[tuple[Any, ...], list[ParameterInfo]] = {}
        for info in in_order_of_backward(infos, list(units)):
            unit = message_of(info)
            settings = json.dumps(options.get(info.parameter, {}), sort_keys=True, default=str)
            alike = (info.divided, info.parameter.requires_grad, info.expert, info.partial, info.holders)
            groups.setdefault((chunk_of(info, chunks), unit, settings, *alike), []).append(info)
        self.flats: list[FlatShard] = []
        scratch = Scratch()
        self._of_chunk: dict[int | None, list[FlatShard]] = {number: [] for number in (*range(len(chunks)), None)}
        arenas = _arenas(list(groups.values()), list(units), processes, compute_dtype) if stage == 3 else {}
        for (chunk, *_), group in groups.items():
            completion = Completion(group[0], processes, ties)
            chosen, arena = options.get(group[0].parameter, {}), arenas.get(group[0])
            flat = FlatShard(group, chosen, processes, compute_dtype, master, seed, completion, scratch, arena)
            if stage == 3:
                flat.arena.leave()
            else:
                flat.arena.take(flat)
                flat.gather()
            self.flats.append(flat)
            self._of_chunk[chunk].append(flat)
        self.entries = [flat.entry for flat in self.flats if flat.trained]
        self.frozen = [flat.entry for flat in self.flats if not flat.trained]
        self._trained = {chunk: [flat for flat in flats if flat.trained] for chunk, flats in self._of_chunk.items()}
        self._orders = {
            chunk: GradientOrder(
                [[i.parameter for i in flat.infos] if chunk is not None else [] for flat in flats],
                lambda place, flats=flats: self._reduce(flats[place]),  # type: ignore[misc]
            )
            for chunk, flats in self._trained.items()
        }
        if stage == 3:
            self._install(units)

    def _install(self, units: dict[str, nn.Module]) -> None:
        last = list(units)[-1]
        for name, unit in units.items():
            held = set(unit.parameters())
            mine = [flat for flat in self.flats if any(info.parameter in held for info in flat.infos)]
            unit.register_forward_pre_hook(_before(mine))
            unit.register_forward_hook(_after(mine, keep=name == last), always_call=True)

    def start_backward(self, chunk: int, last: bool) -> None:
        """See ParameterStore."""
        if self.stage > 1 or last:
            self._orders[chunk].arm()

    def _reduce(self, flat: FlatShard) -> None:
        flat.reduce()
        if self.stage == 3:
            flat.release()

    def end_backward(self, chunk: int, last: bool) -> None:
        """See ParameterStore."""
        if self._orders[chunk].armed:
            self._orders[chunk].complete()
        elif self.stage == 1:
            for flat in self._trained[chunk]:
                flat.keep_gradients()
        for flat in self._trained[None]:  # used by several chunks: complete, and reduced, only at the end
            flat.keep_gradients()
        if self.stage == 3:
            for flat in (*self._of_chunk[chunk], *self._of_chunk[None]):
                flat.release()

    def finish(self) -> None:
        """See ParameterStore."""
        self._orders[None].complete()
        for flat in self.flats:
            if flat.trained:
                flat.complete()

    def publish(self) -> None:
        """See ParameterStore."""
        if self.stage == 3:
            for flat in self.flats:
                flat.release()
                flat.arena.content = None
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


def _arenas(
    groups: list[list[ParameterInfo]], units: list[str], processes: Processes, dtype: torch.dtype
) -> dict[ParameterInfo, Arena]:
    """Return the memory that buffers take in turns, by the first parameter of each; those that it does not name have their own.

    The first and the last unit and what several units share differ in size from the rest, and may be wanted at any time.
    """
    turns: dict[tuple[int, int], list[list[ParameterInfo]]] = {}
    number: dict[str, int] = {}
    for group in groups:
        unit = group[0].unit
        if len(group[0].units) == 1 and unit in units[1:-1]:
            turns.setdefault((units.index(unit) % _TURNS, number.get(unit, 0)), []).append(group)
            number[unit] = number.get(unit, 0) + 1
    found: dict[ParameterInfo, Arena] = {}
    for several in turns.values():
        size = max(_padded_numel(group, processes) for group in several)
        arena = Arena(size, dtype, processes.device, taken_in_turns=True)
        found.update((group[0], arena) for group in several)
    return found


def _padded_numel(group: list[ParameterInfo], processes: Processes) -> int:
    members = spread_of(group[0], processes).shard.size
    return -(-sum(info.parameter.numel() for info in group) // members) * members


def _before(flats: list[FlatShard]) -> Callable[..., None]:
    def hook(unit: nn.Module, inputs: Any) -> None:
        for flat in flats:
            flat.ensure()
            flat.at_work = True

    return hook


def _after(flats: list[FlatShard], keep: bool) -> Callable[..., None]:
    def hook(unit: nn.Module, inputs: Any, output: Any) -> None:
        training = torch.is_grad_enabled()
        for flat in flats:
            flat.at_work = False
            if not (keep and training):
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
