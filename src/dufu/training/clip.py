"""One gradient norm over every parameter of the model, wherever its parts lie."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dufu.parallel.parameters import Entry
from dufu.parallel.process import Processes
from dufu.parallel.store import ParameterStore


def global_norm(store: ParameterStore, processes: Processes, norm_type: float = 2.0) -> Tensor:
    """Return the p-norm of the whole gradient, each element counted once, equal on every process.

    Of equal copies one counts. Where every process holds the whole gradient, each counts for itself and nothing is sent.
    """
    layout = processes.layout
    everywhere = layout.tensor == layout.pipeline == layout.expert == 1 and not store.sharded
    total = _power_sum([e for e in store.entries if everywhere or e.counted], norm_type, processes.device)
    if not everywhere:
        if math.isinf(norm_type):
            processes.world.max_(total)
        else:
            processes.world.sum_(total)
    return total if math.isinf(norm_type) else total.pow(1.0 / norm_type)


def _power_sum(entries: list[Entry], p: float, device: torch.device) -> Tensor:
    grads = [e.tensor.grad for e in entries if e.tensor.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([torch.linalg.vector_norm(g, p, dtype=torch.float32) for g in grads]).double()
    if math.isinf(p):
        return norms.nan_to_num(nan=math.inf, posinf=math.inf).max()  # a maximum over processes may lose a NaN, never an infinity
    return norms.pow(p).sum()
