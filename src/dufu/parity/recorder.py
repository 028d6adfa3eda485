"""Recording steps on one of a layout's processes: hooks on the units, gradients before the update, parameters after the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dufu.models.chain import Batch
from dufu.parallel.build import Distributed, chain_units
from dufu.parallel.parameters import Entry, Piece
from dufu.parallel.process import DIMENSIONS, Processes
from dufu.parallel.region import copy_overlap, whole_region
from dufu.parity.recording import Part, RankRecord, UnitPrint, print_vector
from dufu.training.evaluation import metrics_of, reduce_totals
from dufu.training.step import Totals, TrainStep

NUMBERS = "sample_number"  # the field of Batch.extra that says which sample each row is; -1 in a batch that scores nothing


class RecordedStep(TrainStep):
    """A training step that shows its gradients before it uses them."""

    before_update: Callable[[float], None] = staticmethod(lambda scale: None)

    def _update(self, scale: float) -> None:
        self.before_update(scale)
        super()._update(scale)


class Recorder:
    """Records what this process sees of a training step's updates.

    Args:
        step: makes the updates.
        length: tokens of a sample as the dataset makes it; what a layout adds so that positions divide is left out.
        decoder_length: the same of the decoder's part of a sample.
    """

    def __init__(self, step: RecordedStep, length: int, decoder_length: int = 0) -> None:
        self.step, self.length, self.decoder_length = step, length, decoder_length
        self.distributed: Distributed = step.distributed
        self.processes: Processes = step.distributed.processes
        self.units = list(chain_units(self.distributed.model))
        self._forward: dict[str, list[UnitPrint]] = {}
        self._backward: dict[str, list[UnitPrint]] = {}
        self._gradients: list[Part] = []
        self._steps: list[dict[str, float]] = []
        self._done = 0
        self._sent_before = self._sent()
        self._sent_by: dict[str, dict[str, int]] = {}
        self._initial = [entry.tensor.detach().clone() for entry in self.distributed.store.entries]
        step.before_update = self._before_update  # type: ignore[method-assign, assignment]
        mine = self.distributed.stage_of
        place = self.processes.layout.stage_owner
        for name, module in chain_units(self.distributed.model).items():
            if place(mine[name]) == self.processes.pipeline.rank:
                module.register_forward_hook(self._watch(name))

    def run(self, steps: int, batches: Callable[[int], Sequence[Batch]]) -> RankRecord:
        """Make the updates and return what was seen.

        Args:
            steps: number of updates.
            batches: gives this process's micro-batches of a step.
        """
        for number in range(steps):
            self.step(number, batches(number))
            if number == 0:
                self._sent_by = _difference(self._sent(), self._sent_before)
            sums = reduce_totals(self.step.totals, self.distributed)
            self.step.totals = Totals()
            found = metrics_of(sums, self.distributed.model.objectives)
            losses = {"loss": found["loss"], **{n: found[n] for n in self.distributed.model.objectives if n in found}}
            self._steps.append({**losses, "grad_norm": float(self.step.grad_norm)})
            self._done += 1
        return RankRecord(
            rank=self.processes.rank,
            steps=self._steps,
            gradients=self._gradients,
            parameters=list(self._parts(lambda entry: entry.tensor.detach())),
            forward={unit: UnitPrint.joined(found) for unit, found in self._forward.items()},
            backward={unit: UnitPrint.joined(found) for unit, found in self._backward.items()},
            units=self.units,
            update=self._changes(),
            witness=self._witness(),
        )

    def _before_update(self, scale: float) -> None:
        if self._done == 0:
            self._gradients = list(self._parts(lambda entry: _gradient(entry) / scale))

    def _parts(self, values_of: Callable[[Entry], Tensor]) -> Iterator[Part]:
        """Yield what this process holds, with the values where they count."""
        for entry in self.distributed.store.entries:
            flat = values_of(entry).detach().reshape(-1)
            for piece in entry.pieces:
                values = flat[piece.start : piece.start + piece.region.numel].float().cpu()
                blocks = tuple(tuple(block) for block in piece.region.to_json())
                printed = float(values.double() @ _piece_vector(piece))
                yield Part(
                    piece.info.name,
                    piece.info.shape,
                    blocks,
                    values.clone() if entry.counted else None,
                    printed,
                    self.processes.rank,
                )

    def _changes(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for entry, before in zip(self.distributed.store.entries, self._initial):
            change = (entry.tensor.detach().float() - before.float()).abs().reshape(-1)
            for piece in entry.pieces:
                stretch = change[piece.start : piece.start + piece.region.numel]
                if stretch.numel():
                    found[piece.info.name] = max(float(stretch.max()), found.get(piece.info.name, 0.0))
        return found

    def _watch(self, unit: str) -> Callable[..., None]:
        """Return a forward hook that records a unit's output, and the gradient of it when it comes."""

        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            tensor = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else None
            batch = next((value for value in inputs if isinstance(value, Batch)), None)
            if self._done or tensor is None or batch is None or not torch.is_grad_enabled():
                return
            samples, positions, real = self._tokens(batch, tensor, getattr(module, "of_decoder", False))

            def note(found: dict[str, list[UnitPrint]], value: Tensor, scale: float) -> None:
                values = _printed(value.detach(), positions.dim()) / scale
                ranks = torch.full_like(samples[real], self.processes.rank)
                found.setdefault(unit, []).append(UnitPrint(samples[real], positions[real], ranks, values.cpu()[real]))

            note(self._forward, tensor, 1.0)
            if tensor.requires_grad:
                scale = self.step.scaler.scale if self.step.scaler else 1.0
                tensor.register_hook(lambda grad: note(self._backward, grad, scale))

        return hook

    def _tokens(self, batch: Batch, output: Tensor, of_decoder: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sample and the position of each token of an output, and which of them are real."""
        samples, length = batch.extra[NUMBERS].cpu(), self.length
        if of_decoder and batch.decoder is not None:
            batch, length = batch.decoder, self.decoder_length
        if output.dim() < 3:  # one thing a sample
            return samples, torch.zeros_like(samples), samples >= 0
        places = torch.arange(batch.input_ids.shape[1]) if batch.places is None else batch.places.cpu()
        if output.shape[1] != len(places):  # tensor-parallel processes share positions
            tensor = self.processes.tensor
            places = places.chunk(tensor.size)[tensor.rank] if output.shape[1] * tensor.size == len(places) else places[:0]
        if output.shape[1] != len(places):  # no tokens, whatever it is
            return samples, torch.zeros_like(samples), torch.zeros_like(samples, dtype=torch.bool)
        positions = places.expand(len(samples), -1)
        real = (positions < length) & (samples >= 0)[:, None]
        if batch.padding is not None:
            real = real & batch.padding.cpu().bool()[:, places]
        return samples[:, None].expand_as(positions), positions, real

    def _sent(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        seen: set[int] = set()
        for name in ("world", *DIMENSIONS):
            communicator = getattr(self.processes, name)
            if communicator.size > 1 and id(communicator) not in seen:
                seen.add(id(communicator))
                found[name] = dict(communicator.sent)
        return found

    def _witness(self) -> dict[str, Any]:
        store, layout = self.distributed.store, self.processes.layout
        owner = layout.stage_owner
        return {
            "rank": self.processes.rank,
            "layout": str(layout),
            "units": [u for u, stage in self.distributed.stage_of.items() if owner(stage) == self.processes.pipeline.rank],
            "shapes": {info.name: list(info.local_shape) for info in store.infos},
            "held": sum(piece.region.numel for entry in (*store.entries, *store.frozen) for piece in entry.pieces),
            "sent": self._sent_by,
            "bytes": sum(count for sent in self._sent_by.values() for count in sent.values()),
        }


def _gradient(entry: Entry) -> Tensor:
    grad = entry.tensor.grad
    return torch.zeros_like(entry.tensor) if grad is None else grad.float()


def _piece_vector(piece: Piece) -> Tensor:
    """Return the piece's part of its parameter's print vector."""
    shape = piece.info.shape
    whole = print_vector(int(torch.Size(shape).numel()), piece.info.name)
    part = torch.zeros(piece.region.numel, dtype=torch.float64)
    copy_overlap(part, piece.region, whole, whole_region(shape))
    return part


def _printed(value: Tensor, dims: int) -> Tensor:
    """Return the dot product of each token's, or sample's, numbers with the print vector."""
    flat = value.double().reshape(*value.shape[:dims], -1)
    return flat @ print_vector(flat.shape[-1]).to(flat.device)


def _difference(after: dict[str, dict[str, int]], before: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    return {
        name: {
            kind: count - before.get(name, {}).get(kind, 0)
            for kind, count in sent.items()
            if count != before.get(name, {}).get(kind, 0)
        }
        for name, sent in after.items()
    }


__all__ = ["NUMBERS", "RecordedStep", "Recorder"]
