"""A transformers model's state into one of ours, and back, through the tables that folders are read by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dufu.config.instantiate import resolve
from dufu.interchange.export import foreign_tensors
from dufu.interchange.folder import Tensors
from dufu.interchange.source import ForeignWeights
from dufu.models.hf import complete, family_of
from dufu.parallel.region import Region, copy_overlap, whole_region


class State:
    """A state dict as a file of tensors."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.path, self._state = Path("state"), {name: value.detach() for name, value in state.items()}

    def names(self) -> list[str]:
        return list(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._state[name].dtype

    def rows(self, name: str, first: int, count: int, scratch: Tensor | None = None) -> Tensor:
        value = self._state[name]
        return value.reshape(value.shape[0] if value.dim() else 1, -1)[first : first + count]


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def import_state(target: str, cfg: Mapping[str, Any], state: Mapping[str, Tensor], allow_missing: tuple[str, ...] = ()) -> Any:
    """Return our model, in evaluation mode, with a foreign state's weights."""
    model = resolve(target)(**cfg)
    shapes = shapes_of(model)
    table = family_of(target).table(target, complete(target, cfg))
    source = ForeignWeights(Tensors(Path("state"), [State(state)]), table, shapes)
    missing = source.compare(shapes, allow_missing)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in missing:
                memory = torch.empty(parameter.numel())
                source.read(name, shapes[name], whole_region(shapes[name]), memory)
                parameter.copy_(memory.view(parameter.shape))
    return model.eval()


def export_state(model: nn.Module, target: str, cfg: Mapping[str, Any], gradients: bool = False) -> dict[str, Tensor]:
    """Return the foreign state of our model's weights, or of their gradients."""
    values = {n: (p.grad if gradients else p).detach() for n, p in model.named_parameters() if not gradients or p.grad is not None}

    def read(name: str, shape: tuple[int, ...], region: Region, memory: Tensor) -> None:
        copy_overlap(memory, region, values[name].float().contiguous().view(-1), whole_region(shape))

    table = family_of(target).table(target, complete(target, cfg))
    return dict(foreign_tensors(table, shapes_of(model), read))
