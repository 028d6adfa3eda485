"""Where parameters and gradients live: whole on every process, or sharded over the data-parallel ones (ZeRO)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dufu.parallel import faults
from dufu.parallel.collectives import Communicator
from dufu.parallel.order import GradientOrder
from dufu.parallel.parameters import Entry, ParameterInfo, Piece, fill, give_memory

Options = dict[str, Any]


class ParameterStore(Protocol):
    """What the training step asks of a store, whatever the layout."""

    infos: list[ParameterInfo]  # all the model's parameters
    entries: list[Entry]  # what is trained
    frozen: list[Entry]  # what is not
    sharded: bool

    def start_micro_batch(self, last: bool) -> None:
        """Say that forward and backward of a micro-batch begin; `last` of the step."""

    def end_micro_batch(self) -> None:
        """Say that backward of the micro-batch is done."""

    def finish(self) -> None:
        """Complete the gradients: afterwards each entry's `.grad` is that of the global batch."""

    def publish(self) -> None:
        """Let the model compute with the entries' values."""

    def zero_grad(self) -> None:
        """Forget all gradients."""


def allocate(infos: list[ParameterInfo], device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Give each parameter memory on the device and its initial weights."""
    for info in infos:
        memory = torch.empty(info.parameter.numel(), dtype=torch.float32, device=device)
        fill(info, seed, memory, info.region)
        give_memory(info, memory.view(info.local_shape).to(dtype))


class WholeParameters:
    """Every data-parallel process holds all of its part; gradients are summed in buckets, one a unit, during backward.

    Args:
        infos: the model's parameters, on the meta device.
        options: the optimizer settings of each.
        data: the processes that hold the same part.
        compute_dtype: what the model computes with.
        master: whether the optimizer updates a float32 copy.
    """

    sharded = False

    def __init__(
        self,
        infos: list[ParameterInfo],
        options: dict[nn.Parameter, Options],
        data: Communicator,
        device: torch.device,
        compute_dtype: torch.dtype,
        master: bool,
        seed: int,
    ) -> None:
        self.infos, self.data = infos, data
        self.master = master and compute_dtype != torch.float32
        self.entries: list[Entry] = []
        self.frozen: list[Entry] = []
        self._entry_of: dict[ParameterInfo, Entry] = {}
        allocate(infos, device, torch.float32 if self.master else compute_dtype, seed)
        for info in infos:
            tensor = info.parameter
            if self.master:
                # A frozen parameter needs no float32 copy: what the model computes with is the value itself.
                if info.parameter.requires_grad:
                    tensor = nn.Parameter(info.parameter.detach().clone())
                info.parameter.data = info.parameter.data.to(compute_dtype)
            piece = Piece(info, info.region, 0, info.parameter.numel())
            entry = Entry(tensor, [piece], options.get(info.parameter, {}), info.divided, unsharded=True)
            if not info.parameter.requires_grad:
                self.frozen.append(entry)
                continue
            self.entries.append(entry)
            self._entry_of[info] = entry
        trained = [info for info in infos if info.parameter.requires_grad]
        units = list(dict.fromkeys(info.unit for info in trained))
        units = [u for u in reversed(units) if u != "shared"] + (["shared"] if "shared" in units else [])
        self._buckets = [[info for info in trained if info.unit == unit] for unit in units]
        self._works: list[tuple[Any, Tensor, list[ParameterInfo]]] = []
        during_backward = data.size > 1 and not self.master
        watched = [[info.parameter for info in bucket] if during_backward else [] for bucket in self._buckets]
        self._order = GradientOrder(watched, self._launch)

    def start_micro_batch(self, last: bool) -> None:
        """See ParameterStore."""
        if last and self.data.size > 1 and not self.master:
            self._order.arm()

    def end_micro_batch(self) -> None:
        """See ParameterStore."""
        if self.master:
            for info, entry in self._entry_of.items():
                grad = info.parameter.grad
                if grad is not None:
                    entry.tensor.grad = grad.float() if entry.tensor.grad is None else entry.tensor.grad.add_(grad)
                    info.parameter.grad = None

    def _launch(self, number: int) -> None:
        bucket = self._buckets[number]
        grads = [_gradient(self._entry_of[info].tensor) for info in bucket]
        flat = torch.cat([g.reshape(-1) for g in grads])
        work = None if faults.active("data.skip_reduce") else self.data.sum_(flat, async_op=True)
        self._works.append((work, flat, bucket))

    def finish(self) -> None:
        """See ParameterStore."""
        if self.data.size > 1:
            self._order.complete()
            for work, flat, bucket in self._works:
                if work is not None:
                    work.wait()
                offset = 0
                for info in bucket:
                    tensor = self._entry_of[info].tensor
                    tensor.grad = flat[offset : offset + tensor.numel()].view(tensor.shape)
                    offset += tensor.numel()
            self._works.clear()
        else:
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


def _gradient(tensor: nn.Parameter) -> Tensor:
    """Return the gradient; a parameter that took no part in this step has a gradient of zeros, in every layout."""
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    return tensor.grad
