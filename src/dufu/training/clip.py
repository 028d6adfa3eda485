"""One gradient norm over every parameter of the model, wherever its parts lie."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dufu.parallel.parameters import Entry
from dufu.parallel.process import Processes
from dufu.parallel.store import ParameterStore

_STRETCH = 1024  # numbers that are added up in float32


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


def _norms(grad: Tensor, p: float) -> list[Tensor]:
    """Return the norms of short stretches of a gradient, float32.

    PyTorch's norm of many float32 numbers adds them up in a few long rows and loses digits (2.6e-4 of the norm of 5 million numbers,
    measured), more of them the longer the tensor: the norm would depend on how parameters are put together.
    """
    flat = grad.reshape(-1)
    whole = len(flat) // _STRETCH * _STRETCH
    parts = [flat[:whole].view(-1, _STRETCH), flat[whole:].view(1, -1)]
    return [torch.linalg.vector_norm(part, p, dim=1, dtype=torch.float32) for part in parts if part.numel()]


def _power_sum(entries: list[Entry], p: float, device: torch.device) -> Tensor:
    parts = [part for e in entries if e.tensor.grad is not None for part in _norms(e.tensor.grad, p)]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.cat(parts).double()
    if math.isinf(p):
        return norms.nan_to_num(nan=math.inf, posinf=math.inf).max()  # a maximum over processes may lose a NaN, never an infinity
    return norms.pow(p).sum()
