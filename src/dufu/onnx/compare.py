"""onnxruntime against PyTorch, before a graph is announced."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dufu.errors import DufuError
from dufu.onnx.graph import Graph
from dufu.onnx.session import Session

TOLERANCE = 1e-4  # on numbers below 1 in size; relative to the largest number above: both sum float32 in orders of their own


@dataclass(frozen=True)
class Compared:
    """What a comparison found.

    Args:
        trials: calls compared.
        difference: the largest, relative to the largest number of its output where that exceeds 1.
    """

    trials: int
    difference: float


def compare(graph: Graph, session: Session) -> Compared:
    """Call a graph in PyTorch and in onnxruntime at all of its trials.

    Raises:
        DufuError: names or shapes differ, numbers differ by more than TOLERANCE, or are not finite.
    """
    for what, ours, theirs in (("inputs", graph.inputs(), session.inputs), ("outputs", graph.outputs(), session.outputs)):
        if list(ours) != theirs:
            raise DufuError(f"the graph's {what} are {', '.join(theirs)}, instead of {', '.join(ours)}")
    count, largest = 0, 0.0
    for trial in graph.trials():
        with torch.no_grad():
            expected = graph(trial.tensors)
        for name, right, found in zip(graph.outputs(), expected, session(trial.tensors), strict=True):
            if right.shape != found.shape:
                raise DufuError(f"{graph.file}: {name} of {trial.label} is {list(found.shape)} instead of {list(right.shape)}")
            if not bool(torch.isfinite(right).all()):
                raise DufuError(f"{name} of {trial.label} is not finite in PyTorch either; the weights are no trained model's")
            if not right.numel():
                continue
            size = max(1.0, float(right.abs().max()))
            difference = float((right - found).abs().max()) / size
            if not difference <= TOLERANCE:
                raise DufuError(
                    f"{graph.file}: {name} of {trial.label} differs from PyTorch by {difference:.2g}, more than {TOLERANCE:g}"
                )
            largest = max(largest, difference)
        count += 1
    return Compared(count, largest)
