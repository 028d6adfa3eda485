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

    Replicated parameters count on the first tensor-parallel process only; sharded ones on each process for its stretch.
    """
    counted = [e for e in store.entries if e.divided or processes.tensor.rank == 0]
    total = _power_sum(counted, norm_type, processes.device)
    for communicator in (processes.tensor, *([processes.data] if store.sharded else [])):
        if math.isinf(norm_type):
            communicator.max_(total)
        else:
            communicator.sum_(total)
    return total if math.isinf(norm_type) else total.pow(1.0 / norm_type)


def _power_sum(entries: list[Entry], p: float, device: torch.device) -> Tensor:
    grads = [e.tensor.grad for e in entries if e.tensor.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([torch.linalg.vector_norm(g, p, dtype=torch.float32) for g in grads]).double()
    if math.isinf(p):
        return norms.nan_to_num(nan=math.inf, posinf=math.inf).max()  # a maximum over processes may lose a NaN, never an infinity
    return norms.pow(p).sum()
