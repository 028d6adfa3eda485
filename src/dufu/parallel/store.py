"""Where parameters and gradients live: whole on every process, or sharded over the replicas (ZeRO)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dufu.parallel import faults
from dufu.parallel.collectives import Communicator
from dufu.parallel.order import GradientOrder
from dufu.parallel.parameters import Entry, ParameterInfo, Piece, fill, give_memory, is_first, spread_of
from dufu.parallel.process import Processes

Options = dict[str, Any]
Ties = dict[tuple[int, ...], Communicator]  # the pipeline's processes that hold a parameter together, by their places


class ParameterStore(Protocol):
    """What the training step asks of a store, whatever the layout.

    A chunk is what runs backward in one go: one of this process's stages of the pipeline, or the whole chain.
    """

    infos: list[ParameterInfo]  # the parameters that this process holds
    shapes: dict[str, tuple[int, ...]]  # of the whole model's parameters
    entries: list[Entry]  # what is trained
    frozen: list[Entry]  # what is not
    saves_frozen: bool  # whether a checkpoint holds what is not trained, too
    sharded: bool

    def start_backward(self, chunk: int, last: bool) -> None:
        """Say that backward of a micro-batch through a chunk begins; `last` of the step. It may be said before its forward."""

    def end_backward(self, chunk: int, last: bool) -> None:
        """Say that backward of a micro-batch through a chunk is done."""

    def finish(self) -> None:
        """Complete the gradients: afterwards each entry's `.grad` is that of the global batch."""

    def publish(self) -> None:
        """Let the model compute with the entries' values."""

    def zero_grad(self) -> None:
        """Forget all gradients."""


def allocate(infos: list[ParameterInfo], device: torch.device, dtype: torch.dtype, seed: int | None) -> None:
    """Give each parameter memory on the device and its initial weights."""
    for info in infos:
        memory = torch.empty(info.parameter.numel(), dtype=torch.float32, device=device)
        fill(info, seed, memory, info.region)
        give_memory(info, memory.view(info.local_shape).to(dtype))


def chunk_of(info: ParameterInfo, chunks: Sequence[Sequence[str]]) -> int | None:
    """Return the chunk that a parameter belongs to; None when several chunks use it, whose gradient is complete only at the end."""
    using = {number for number, units in enumerate(chunks) for unit in units if unit in info.units}
    return using.pop() if len(using) == 1 else (0 if not using else None)


def message_of(info: ParameterInfo) -> str:
    """Return with which others a gradient may travel: those of one unit, or those that units of this process share.

    One that several of the pipeline's processes hold travels alone, since they share different ones with each other.
    """
    if len(info.holders) > 1:
        return info.name
    return info.unit if len(info.units) == 1 else ""


def in_order_of_backward(infos: list[ParameterInfo], units: Sequence[str]) -> list[ParameterInfo]:
    """Return parameters in the order in which backward completes their gradients: the last units first, those of several units last.

    These stay in the model's order, which is the same on all processes that hold them.
    """
    place = {unit: number for number, unit in enumerate(units)}
    return sorted(infos, key=lambda info: (1, 0) if len(info.units) != 1 else (0, -place.get(info.unit, 0)))


class Completion:
    """The sums that a gradient needs beyond the replicas: over tensor-parallel processes and over the pipeline's holders.

    Args:
        info: a parameter; others with the same answers can be summed in the same message.
    """

    def __init__(self, info: ParameterInfo, processes: Processes, ties: Ties) -> None:
        self._tensor = processes.tensor if info.partial else None
        self._holders = ties[info.holders] if len(info.holders) > 1 else None

    @property
    def needed(self) -> bool:
        """Say whether there is anything to sum."""
        return self._tensor is not None or self._holders is not None

    def sum_(self, grad: Tensor) -> None:
        """Sum in place."""
        if self._tensor is not None and not faults.active("sequence.skip_gradient_sum"):
            self._tensor.sum_(grad)
        if self._holders is not None and not faults.active("pipeline.untied"):
            self._holders.sum_(grad)


class WholeParameters:
    """Every replica holds all of its part; gradients are summed in buckets, one a unit, during backward.

    Args:
        infos: the parameters that this process holds, on the meta device.
        options: the optimizer settings of each.
        processes: of the layout.
        compute_dtype: what the model computes with.
        master: whether the optimizer updates a float32 copy.
        chunks: the units that run backward in one go, in the order of the chain.
        ties: communicators for parameters that several of the pipeline's processes hold.
    """

    sharded = False
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
    ) -> None:
        self.infos, self.processes = infos, processes
        self.shapes = {info.name: info.shape for info in infos}
        self.master = master and compute_dtype != torch.float32
        self.entries: list[Entry] = []
        self.frozen: list[Entry] = []
        self._entry_of: dict[ParameterInfo, Entry] = {}
        allocate(infos, processes.device, torch.float32 if self.master else compute_dtype, seed)
        for info in infos:
            tensor = info.parameter
            if self.master:
                # A frozen parameter needs no float32 copy: what the model computes with is the value itself.
                if info.parameter.requires_grad:
                    tensor = nn.Parameter(info.parameter.detach().clone())
                info.parameter.data = info.parameter.data.to(compute_dtype)
            piece = Piece(info, info.region, 0, info.parameter.numel())
            entry = Entry(
                tensor, [piece], options.get(info.parameter, {}), info.divided, unsharded=True,
                spread=spread_of(info, processes), first=is_first(info, processes),
            )  # fmt: skip
            if not info.parameter.requires_grad:
                self.frozen.append(entry)
                continue
            self.entries.append(entry)
            self._entry_of[info] = entry
        self._buckets: list[_Bucket] = []
        self._of_chunk: dict[int | None, list[int]] = {number: [] for number in (*range(len(chunks)), None)}
        self._make_buckets([i for i in infos if i.parameter.requires_grad], chunks, ties)
        watched = processes.replicas.size > 1 and not self.master
        self._orders = {
            chunk: GradientOrder(
                [[i.parameter for i in self._buckets[n].infos] if watched and chunk is not None else [] for n in numbers],
                lambda place, numbers=numbers: self._buckets[numbers[place]].launch(),  # type: ignore[misc]
            )
            for chunk, numbers in self._of_chunk.items()
        }
        self._together = any(bucket.travels for bucket in self._buckets)

    def _make_buckets(self, trained: list[ParameterInfo], chunks: Sequence[Sequence[str]], ties: Ties) -> None:
        found: dict[Any, list[ParameterInfo]] = {}
        for info in in_order_of_backward(trained, [unit for units in chunks for unit in units]):
            unit = message_of(info)
            found.setdefault((chunk_of(info, chunks), unit, info.expert, info.partial, info.holders), []).append(info)
        for (chunk, *_), infos in found.items():
            self._of_chunk[chunk].append(len(self._buckets))
            communicator = self._entry_of[infos[0]].spread.reduce
            completion = Completion(infos[0], self.processes, ties)
            self._buckets.append(_Bucket(infos, [self._entry_of[i].tensor for i in infos], communicator, completion))

    def start_backward(self, chunk: int, last: bool) -> None:
        """See ParameterStore."""
        if last and self._together and not self.master:
            self._orders[chunk].arm()

    def end_backward(self, chunk: int, last: bool) -> None:
        """See ParameterStore."""
        if self.master:
            for info, entry in self._entry_of.items():
                grad = info.parameter.grad
                if grad is not None:
                    entry.tensor.grad = grad.float() if entry.tensor.grad is None else entry.tensor.grad.add_(grad)
                    info.parameter.grad = None
        if last and self._together:
            self._orders[chunk].complete()

    def finish(self) -> None:
        """See ParameterStore."""
        if self._together:
            self._orders[None].complete()
            for bucket in self._buckets:
                bucket.take()
        for entry in self.entries:
            _gradient(entry.tensor)

    def publish(self) -> None:
        """See ParameterStore."""
        if self.master:
            with torch.no_grad():
                for info, entry in self._entry_of.items():
                    info.parameter.copy_(entry.tensor)

    def zero_grad(self) -> None:
        """See ParameterStore."""
        for entry in self.entries:
            entry.tensor.grad = None
        for info in self.infos:
            info.parameter.grad = None


class _Bucket:
    """Gradients that travel in one message.

    Args:
        infos: their parameters.
        tensors: what holds each gradient.
        communicator: the replicas.
        completion: the sums beyond the replicas.
    """

    def __init__(
        self, infos: list[ParameterInfo], tensors: list[nn.Parameter], communicator: Communicator, completion: Completion
    ) -> None:
        self.infos, self._tensors, self._communicator, self._completion = infos, tensors, communicator, completion
        self._flat: Tensor | None = None
        self._work: Any = None

    @property
    def travels(self) -> bool:
        """Say whether other processes have a part in the gradients."""
        return self._communicator.size > 1 or self._completion.needed

    def launch(self) -> None:
        """Begin to sum over the replicas."""
        if self.travels:
            self._flat = torch.cat([_gradient(tensor).reshape(-1) for tensor in self._tensors])
            self._work = None if faults.active("data.skip_reduce") else self._communicator.sum_(self._flat, async_op=True)

    def take(self) -> None:
        """Wait for the sum, make the others, and let each parameter have its gradient."""
        if self._flat is None:
            return
        if self._work is not None:
            self._work.wait()
        if faults.active("data.double"):
            self._flat *= 2
        self._completion.sum_(self._flat)
        offset = 0
        for tensor in self._tensors:
            tensor.grad = self._flat[offset : offset + tensor.numel()].view(tensor.shape)
            offset += tensor.numel()
        self._flat = self._work = None


def _gradient(tensor: nn.Parameter) -> Tensor:
    """Return the gradient; a parameter that took no part in this step has a gradient of zeros, in every layout."""
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    return tensor.grad
