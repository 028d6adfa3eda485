"""Make a step again with an eye on every unit, and say where its numbers stop being finite. No weight is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dufu.models.chain import Batch
from dufu.parallel.build import chain_units
from dufu.training.clip import global_norm
from dufu.training.step import TrainStep

SAMPLES = "sample_number"  # the field of Batch.extra that says which sample of the run each row is; -1 where it scores nothing
_WEIGHT, _FORWARD, _BACKWARD, _GRADIENT = range(4)  # in the order in which they come about


@dataclass(frozen=True, order=True)
class Finding:
    """Where a number that is not finite was first seen.

    Args:
        phase: weight, forward, backward, gradient of a weight.
        place: of the unit, in the order in which the phase comes by.
        unit: its name.
        what: what was not finite.
        samples: of the run, where they can be told apart.
        process: rank.
    """

    phase: int
    place: int
    unit: str
    what: str
    samples: tuple[int, ...] = field(default=(), compare=False)
    process: int = 0

    def __str__(self) -> str:
        where = (
            f" (samples {', '.join(map(str, self.samples[:8]))}{', …' if len(self.samples) > 8 else ''})" if self.samples else ""
        )
        return f"unit {self.unit}: {self.what}{where}"


class ExaminedStep(TrainStep):
    """A training step that looks at its gradients instead of using them.

    Args:
        step: whose parts it works with.
    """

    def __init__(self, step: TrainStep) -> None:
        super().__init__(step.distributed, step.optimizer, step.schedule, step.precision, step.scaler, step.clip, step.norm_type)
        self.findings: list[Finding] = []
        self.module = ""  # the first one whose output was not finite, where `examine` was to look inside units

    def _update(self, scale: float) -> None:
        self.grad_norm = global_norm(self.distributed.store, self.distributed.processes, self.norm_type) / scale
        for name, values in self._pieces(gradients=True):
            if not _finite(values):
                self._note(_GRADIENT, name, f"the gradient of {name} is not finite, though all that passes between units is")
        self.distributed.store.zero_grad()

    def _pieces(self, gradients: bool) -> list[tuple[str, Tensor]]:
        """Return this process's weights, or gradients, by parameter."""
        store, found = self.distributed.store, []
        for entry in [*store.entries, *([] if gradients else store.frozen)]:
            values = entry.tensor.grad if gradients else entry.tensor.detach()
            if values is None:
                continue
            flat = values.reshape(-1)
            found += [(p.info.name, flat[p.start : p.start + p.length]) for p in entry.pieces]
        return found

    def _note(self, phase: int, name: str, what: str, samples: tuple[int, ...] = (), unit: str | None = None) -> None:
        units = list(chain_units(self.distributed.model))
        owner = unit or next((u for u in units if name.startswith(f"{u}.")), None)
        owner = owner or next((info.unit for info in self.distributed.infos if info.name == name), name)
        place = units.index(owner) if owner in units else len(units)
        place = place if phase in (_WEIGHT, _FORWARD) else len(units) - place
        self.findings.append(Finding(phase, place, owner, what, samples, self.distributed.processes.rank))

    def examine(self, step: int, batches: Sequence[Batch], inside: bool = False) -> Finding | None:
        """Make the step, without its update, and return what was first not finite on any process; every process calls it alike.

        Args:
            step: its number, from 0.
            batches: this process's micro-batches, with `SAMPLES` in their extra fields.
            inside: look at every module's output, too.
        """
        self.findings, self.module = [], ""
        for name, values in self._pieces(gradients=False):
            if not _finite(values):
                self._note(_WEIGHT, name, f"the weight {name} is not finite before the step")
        handles = [*self._watch_units(), *(self._watch_modules() if inside else ())]
        try:
            self(step, batches)
        finally:
            for handle in handles:
                handle.remove()
        everyone = self.distributed.processes.world.objects(min(self.findings, default=None))
        return min((found for found in everyone if found is not None), default=None)

    def _watch_units(self) -> list[RemovableHandle]:
        distributed = self.distributed
        units = chain_units(distributed.model)
        names = list(units)
        here = distributed.processes.pipeline.rank
        layout = distributed.processes.layout
        handles = []
        for number, (name, unit) in enumerate(units.items()):
            if layout.stage_owner(distributed.stage_of[name]) == here:
                following = names[number + 1] if number + 1 < len(names) else ""
                handles.append(unit.register_forward_hook(self._unit_hook(name, following)))
        return handles

    def _watch_modules(self) -> list[RemovableHandle]:
        def watch(name: str) -> Any:
            def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
                if not self.module and not all(_finite(t) for t in _tensors(output)):
                    self.module = name

            return hook

        return [module.register_forward_hook(watch(name)) for name, module in self.distributed.model.named_modules() if name]

    def _unit_hook(self, name: str, following: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            batch = inputs[-1] if inputs and isinstance(inputs[-1], Batch) else None
            for tensor in _tensors(output):
                if not _finite(tensor):
                    self._note(_FORWARD, name, "its output is not finite in forward", _samples(tensor, batch), name)
                if tensor.requires_grad:
                    tensor.register_hook(gradient(batch))

        def gradient(batch: Batch | None) -> Any:
            def look(grad: Tensor) -> None:
                if not _finite(grad):
                    self._note(
                        _BACKWARD,
                        name,
                        "the gradient that it hands back is not finite in backward",
                        _samples(grad, batch),
                        following or name,
                    )

            return look

        return hook


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _samples(tensor: Tensor, batch: Batch | None) -> tuple[int, ...]:
    """Return the samples whose rows of a tensor are not finite, where rows are samples."""
    numbers = None if batch is None else batch.extra.get(SAMPLES)
    if numbers is None or tensor.dim() < 2 or tensor.shape[0] != len(numbers):
        return ()
    bad = ~torch.isfinite(tensor).flatten(1).all(1)
    return tuple(int(n) for n in numbers[bad.to(numbers.device)].tolist() if n >= 0)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of what a unit hands on."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
