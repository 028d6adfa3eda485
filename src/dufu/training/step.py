"""One update of the weights: the same function for one process and many, whole and sharded, with and without accumulation."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dufu.models.chain import Batch, ChainModel
from dufu.optim.schedules import Schedule
from dufu.parallel.build import Distributed
from dufu.training.clip import global_norm
from dufu.training.precision import LossScaler, Precision

OUT_OF_TIME = 0  # a wish to stop that is no signal
_WISHES = (OUT_OF_TIME, int(signal.SIGINT), int(signal.SIGTERM))  # each with a place of its own in the counts' message


@dataclass
class Totals:
    """Sums over the steps of a logging period, on this process, on the device."""

    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        """Add to a sum, in float64."""
        value = value.detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value


class TrainStep:
    """Forward, backward, clip, update.

    Args:
        distributed: the laid-out model.
        optimizer: over the store's entries.
        schedule: sets the learning rate.
        precision, scaler: mixed precision; the scaler only for fp16.
        clip: largest global norm; 0 or less = no clipping.
        norm_type: p of the norm.
    """

    def __init__(
        self,
        distributed: Distributed,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        precision: Precision,
        scaler: LossScaler | None,
        clip: float,
        norm_type: float,
    ) -> None:
        self.distributed, self.optimizer, self.schedule = distributed, optimizer, schedule
        self.precision, self.scaler, self.clip, self.norm_type = precision, scaler, clip, norm_type
        self.totals = Totals()
        self.grad_norm: Tensor = torch.zeros(())
        self.lr = 0.0
        self.skipped = False
        self.stop_seen = False  # whether any process wished to stop
        self.stop_signal: int | None = None  # the signal that it had got

    def count(self, batches: Sequence[Batch], stop: int | None = None) -> dict[str, Tensor]:
        """Return what each objective scores in the global batch; tell and learn whether any process wants to stop."""
        processes, model = self.distributed.processes, self.distributed.model
        names = sorted(set(model.objectives.values()))
        mine = []
        if processes.counts_tokens:
            views = [model.view(batch) for batch in batches] if isinstance(model, ChainModel) else batches
            mine = [model.counts(batch) for batch in views]
        numbers = [float(sum(c[name] for c in mine)) for name in names]
        wishes = [float(stop == wish) for wish in _WISHES]
        packed = torch.tensor([*numbers, *wishes], dtype=torch.float64, device=processes.device)
        processes.world.sum_(packed)
        if processes.world.size > 1 or stop is not None:
            seen = [wish for wish, count in zip(_WISHES, packed[len(names) :].tolist()) if count]
            self.stop_seen, self.stop_signal = bool(seen), max(seen, default=OUT_OF_TIME) or None
        return {name: packed[i].clamp(min=1.0).float() for i, name in enumerate(names)}

    def __call__(self, step: int, batches: Sequence[Batch], stop: int | None = None) -> None:
        """Make update number `step` (counted from 0) from this process's micro-batches of the global batch.

        Args:
            stop: this process's wish to end after the step, a signal's number or `OUT_OF_TIME`; all processes learn of it.
        """
        store, model = self.distributed.store, self.distributed.model
        device = self.distributed.processes.device
        model.train()
        counts = self.count(batches, stop)
        scale = self.scaler.scale if self.scaler else 1.0
        store.zero_grad()

        def loss(sums: dict[str, Tensor]) -> Tensor:
            for name, value in sums.items():
                self.totals.add(name, value)
            return torch.stack([sums[name].float() / counts[by] for name, by in model.objectives.items()]).sum() * scale

        self.distributed.runner.train(batches, lambda: self.precision.autocast(device), loss)
        store.finish()
        self.schedule.set(step)
        self.lr = self.optimizer.param_groups[0]["lr"]
        self._update(scale)

    def _update(self, scale: float) -> None:
        store = self.distributed.store
        norm = global_norm(store, self.distributed.processes, self.norm_type) / scale
        self.grad_norm = norm
        value = float(norm)
        finite = math.isfinite(value)
        self.skipped = not finite
        if finite:
            factor = min(1.0, self.clip / (value + 1e-6)) if self.clip > 0 else 1.0
            self._scale_gradients(factor / scale)
            self.optimizer.step()
            store.publish()
        if self.scaler:
            self.scaler.update(finite)
        store.zero_grad()

    def _scale_gradients(self, factor: float) -> None:
        """Multiply all gradients, inside the fused optimizer's own pass where it can."""
        if all(group.get("fused") for group in self.optimizer.param_groups):
            inverse: Any = None
            if factor != 1.0:
                inverse = torch.tensor(1.0 / factor, device=self.distributed.processes.device)
            self.optimizer.grad_scale = inverse  # type: ignore[attr-defined]
        elif factor != 1.0:
            torch._foreach_mul_([e.tensor.grad for e in self.distributed.store.entries if e.tensor.grad is not None], factor)
