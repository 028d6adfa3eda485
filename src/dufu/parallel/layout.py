"""One validated object that says which process does what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from dufu.errors import LayoutError, NotBuiltError

NOT_BUILT = {
    "pipeline_parallel_size": "pipeline parallelism is not built yet; set train.dist.pipeline_parallel_size=1",
    "context_parallel_size": "context parallelism is not built yet; set train.dist.context_parallel_size=1",
    "expert_parallel_size": "expert parallelism is not built yet; set train.dist.expert_parallel_size=1",
}


@dataclass(frozen=True)
class ParallelLayout:
    """How many processes share what. Ranks count the tensor-parallel processes fastest, then the data-parallel ones.

    Args:
        data, tensor: sizes; their product is the number of processes.
        zero_stage: 0 replicated; 1 optimizer state, 2 gradients too, 3 weights too, sharded over the data-parallel processes.
    """

    data: int = 1
    tensor: int = 1
    zero_stage: int = 0

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return self.data * self.tensor

    def data_rank(self, rank: int) -> int:
        """Return which share of the batch a process takes."""
        return rank // self.tensor % self.data

    def tensor_rank(self, rank: int) -> int:
        """Return which part of each split layer a process holds."""
        return rank % self.tensor

    def tensor_groups(self) -> list[list[int]]:
        """Return the sets of ranks that hold parts of one copy of the model."""
        return [[d * self.tensor + t for t in range(self.tensor)] for d in range(self.data)]

    def data_groups(self) -> list[list[int]]:
        """Return the sets of ranks that hold the same part."""
        return [[d * self.tensor + t for d in range(self.data)] for t in range(self.tensor)]

    def __str__(self) -> str:
        """Write the layout as text, such as `dp2xtp2` or `zero3`."""
        parts = []
        if self.zero_stage and self.data > 1:
            parts.append(f"zero{self.zero_stage}" + (f"(dp{self.data})" if self.data > 2 else ""))
        elif self.data > 1:
            parts.append(f"dp{self.data}")
        if self.tensor > 1:
            parts.append(f"tp{self.tensor}")
        return "x".join(parts) or "one process"


def layout_from_config(train: Any, world: int) -> ParallelLayout:
    """Return the layout that `train.dist` and `train.zero_optimization` describe, for `world` processes.

    Raises:
        NotBuiltError: a dimension that does not exist yet.
        LayoutError: sizes that do not multiply to the world, or contradictory ZeRO settings.
    """
    dist, zero = train.dist, train.zero_optimization
    for name, message in NOT_BUILT.items():
        if dist[name] < 1:
            raise LayoutError(f"train.dist.{name}={dist[name]}: at least 1")
        if dist[name] > 1:
            raise NotBuiltError(message)
    if dist.sequence_parallel:
        raise NotBuiltError("sequence parallelism is not built yet; set train.dist.sequence_parallel=false")
    if zero.stage is not None and not zero.enabled:
        raise LayoutError(f"train.zero_optimization.stage={zero.stage} but train.zero_optimization.enabled=false; set enabled=true")
    tensor = dist.tensor_parallel_size
    if tensor < 1:
        raise LayoutError(f"train.dist.tensor_parallel_size={tensor}: at least 1")
    if world % tensor:
        fits = [n for n in range(1, world + 1) if world % n == 0]
        near = min(fits, key=lambda n: abs(n - tensor))
        raise LayoutError(f"train.dist.tensor_parallel_size={tensor} does not divide {world} processes; nearest that does: {near}")
    data = world // tensor
    if dist.data_parallel_size is not None and dist.data_parallel_size != data:
        need = dist.data_parallel_size * tensor
        raise LayoutError(
            f"data_parallel_size {dist.data_parallel_size} × tensor_parallel_size {tensor} = {need} processes, "
            f"but {world} were started; start {need} (--nproc {need}) or set train.dist.data_parallel_size={data}"
        )
    return ParallelLayout(data, tensor, (zero.stage or 1) if zero.enabled else 0)


def check_model(model: nn.Module, layout: ParallelLayout) -> None:
    """Raise LayoutError, naming the layer and both numbers, when a split layer does not divide over the layout."""
    if layout.tensor == 1:
        return
    for name, module in model.named_modules():
        check = getattr(module, "check_split", None)
        if check is not None:
            try:
                check(layout.tensor)
            except LayoutError as error:
                raise LayoutError(f"{name}: {error}") from None
    for name, shape, rule in split_parameters(model):
        for length in rule.sections or (shape[rule.dim],):
            if not rule.padded and length % layout.tensor:
                near = -(-length // layout.tensor) * layout.tensor
                raise LayoutError(
                    f"{name}: {length} does not divide over tensor_parallel_size={layout.tensor}; the nearest length is {near}"
                )


def split_parameters(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Yield (name, shape, rule) of every parameter that says how it may be split."""
    for prefix, module in model.named_modules():
        for leaf, rule in getattr(module, "splits", {}).items():
            parameter = getattr(module, leaf, None)
            if parameter is not None:
                yield f"{prefix}.{leaf}" if prefix else leaf, tuple(parameter.shape), rule
