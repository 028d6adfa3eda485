"""One validated object that says which process does what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from dufu.errors import LayoutError

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
_SEVERAL_STAGES = SCHEDULES[2:]  # these give each process several stages of the pipeline
_V_SHAPED = ("zbv", "dualpipev")  # these give it one on the way down and one on the way up


@dataclass(frozen=True)
class Pipelining:
    """How the chain of units runs through a pipeline.

    Args:
        schedule: one of SCHEDULES.
        virtual: stages on each process.
        num_layers: layers that the pipeline divides; None = the model's.
        stage_ids: stage of each layer; None = balanced by cost.
    """

    schedule: str = "1f1b"
    virtual: int = 1
    num_layers: int | None = None
    stage_ids: tuple[int, ...] | None = None

    @property
    def v_shaped(self) -> bool:
        """Say whether the last process holds neighbouring stages, and the first one the first and the last stage."""
        return self.schedule in _V_SHAPED


@dataclass(frozen=True)
class ParallelLayout:
    """How many processes share what.

    Ranks count the tensor-parallel processes fastest, then the context-parallel, the data-parallel and the pipeline's: a rank is
    ((p · data + d) · context + c) · tensor + t. The data × context processes with the same p and t are replicas: they hold the same
    part of the model. Experts and shards divide the replicas, the nearest ones first.

    Args:
        data, tensor, pipeline, context: sizes; their product is the number of processes.
        expert: replicas that share the experts of a mixture layer.
        zero_stage: 0 replicated; 1 optimizer state, 2 gradients too, 3 weights too, sharded over the replicas.
        shard: replicas over which ZeRO shards, others repeating them (hybrid sharding); None = all.
        sequence: whether the tensor-parallel processes share the positions of what they do not split otherwise.
        context_method: how queries reach the keys of other processes.
        pipelining: how the pipeline runs.
    """

    data: int = 1
    tensor: int = 1
    zero_stage: int = 0
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    shard: int | None = None
    sequence: bool = False
    context_method: str = "all_gather"
    pipelining: Pipelining = Pipelining()

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return self.pipeline * self.replicas * self.tensor

    @property
    def replicas(self) -> int:
        """Return the number of processes that hold the same part of the model."""
        return self.data * self.context

    @property
    def stages(self) -> int:
        """Return the number of stages of the pipeline."""
        return self.pipeline * self.pipelining.virtual

    def stage_owner(self, stage: int) -> int:
        """Return which of the pipeline's processes runs a stage."""
        if self.pipelining.v_shaped:
            return min(stage, self.stages - 1 - stage)
        return stage % self.pipeline

    def rank_of(self, p: int, replica: int, t: int) -> int:
        """Return the rank at a place of the layout."""
        return (p * self.replicas + replica) * self.tensor + t

    def groups(self, dimension: str) -> list[list[int]]:
        """Return the sets of ranks that share a dimension, all of them together being all ranks.

        Args:
            dimension: tensor, context, data, pipeline, replicas; expert (hold different experts), expert_replicas (hold the same ones);
                shard (each a stretch of what its group holds), repeat (hold the same stretch).
        """
        ps, rs, ts = range(self.pipeline), range(self.replicas), range(self.tensor)
        if dimension == "tensor":
            return [[self.rank_of(p, r, t) for t in ts] for p in ps for r in rs]
        if dimension == "pipeline":
            return [[self.rank_of(p, r, t) for p in ps] for r in rs for t in ts]
        shard = self.shard or self.replicas
        chosen: dict[str, list[list[int]]] = {  # sets of replicas
            "replicas": [list(rs)],
            "context": [[d * self.context + c for c in range(self.context)] for d in range(self.data)],
            "data": [[d * self.context + c for d in range(self.data)] for c in range(self.context)],
            "expert": [list(rs[i : i + self.expert]) for i in range(0, self.replicas, self.expert)],
            "expert_replicas": [list(rs[i :: self.expert]) for i in range(self.expert)],
            "shard": [list(rs[i : i + shard]) for i in range(0, self.replicas, shard)],
            "repeat": [list(rs[i::shard]) for i in range(shard)],
        }
        return [[self.rank_of(p, r, t) for r in some] for p in ps for t in ts for some in chosen[dimension]]

    def __str__(self) -> str:
        """Write the layout as text, such as `dp2xtp2` or `zero3xpp2`; a pipeline's own list of stages is not in it."""
        parts = []
        if self.zero_stage and self.replicas > 1:
            hybrid = [f"shard{self.shard}"] if self.shard and self.shard < self.replicas else []
            data = [f"dp{self.data}"] if self.data != 2 or self.context > 1 or hybrid else []
            parts.append(f"zero{self.zero_stage}" + (f"({','.join([*data, *hybrid])})" if data else ""))
        elif self.data > 1:
            parts.append(f"dp{self.data}")
        if self.tensor > 1:
            parts.append(f"sp{self.tensor}" if self.sequence else f"tp{self.tensor}")
        if self.pipeline > 1:
            how = self.pipelining
            usual = 2 if how.schedule in _SEVERAL_STAGES else 1
            virtual = "" if how.virtual == usual else f",virtual{how.virtual}"
            parts.append(f"pp{self.pipeline}" + ("" if how.schedule == "1f1b" else f"({how.schedule}{virtual})"))
        if self.context > 1:
            parts.append(f"cp{self.context}" + ("" if self.context_method == "all_gather" else f"({self.context_method})"))
        if self.expert > 1:
            parts.append(f"ep{self.expert}")
        return "x".join(parts) or "one process"


CONTEXT_METHODS = ("all_gather", "all_to_all", "ring")


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: abs(n - wanted))


def layout_from_config(train: Any, world: int) -> ParallelLayout:
    """Return the layout that `train.dist` and `train.zero_optimization` describe, for `world` processes.

    Raises:
        LayoutError: sizes that do not multiply to the world, or settings that contradict each other.
    """
    dist, zero = train.dist, train.zero_optimization
    sizes = {name: dist[f"{name}_parallel_size"] for name in ("tensor", "pipeline", "context")}
    for name, size in {**sizes, "expert": dist.expert_parallel_size}.items():
        if size < 1:
            raise LayoutError(f"train.dist.{name}_parallel_size={size}: at least 1")
    used = 1
    for name, size in sizes.items():
        left = world // used
        if left % size:
            before = f" (with {', '.join(f'{n} {s}' for n, s in sizes.items() if s > 1 and n != name)})" if used > 1 else ""
            raise LayoutError(
                f"train.dist.{name}_parallel_size={size} does not divide {world} processes{before}; nearest that does: "
                f"{_nearest_divisor(left, size)}"
            )
        used *= size
    data = world // used
    if dist.data_parallel_size is not None and dist.data_parallel_size != data:
        need = dist.data_parallel_size * used
        product = " × ".join(f"{n}_parallel_size {s}" for n, s in sizes.items() if s > 1 or n == "tensor")
        raise LayoutError(
            f"data_parallel_size {dist.data_parallel_size} × {product} = {need} processes, "
            f"but {world} were started; start {need} (--nproc {need}) or set train.dist.data_parallel_size={data}"
        )
    replicas, expert = data * sizes["context"], dist.expert_parallel_size
    if replicas % expert:
        raise LayoutError(
            f"train.dist.expert_parallel_size={expert} does not divide the {replicas} processes that hold the same part of the model "
            f"(data {data} × context {sizes['context']}); nearest that does: {_nearest_divisor(replicas, expert)}"
        )
    if dist.sequence_parallel and sizes["tensor"] == 1:
        raise LayoutError(
            "train.dist.sequence_parallel=true divides positions over the tensor-parallel processes, but "
            "train.dist.tensor_parallel_size=1; set it to 2 or more, or sequence_parallel=false"
        )
    return ParallelLayout(
        data,
        sizes["tensor"],
        **_zero(zero, replicas),
        pipeline=sizes["pipeline"],
        context=sizes["context"],
        expert=expert,
        sequence=dist.sequence_parallel,
        context_method=dist.context_parallel_method,
        pipelining=_pipelining(dist),
    )


def _zero(zero: Any, replicas: int) -> dict[str, Any]:
    """Return the settings of ZeRO."""
    for name in ("stage", "shard_size"):
        if zero[name] is not None and not zero.enabled:
            raise LayoutError(
                f"train.zero_optimization.{name}={zero[name]} but train.zero_optimization.enabled=false; set enabled=true"
            )
    shard = zero.shard_size
    if shard is not None and (shard < 1 or replicas % shard):
        raise LayoutError(
            f"train.zero_optimization.shard_size={shard} does not divide the {replicas} processes that hold the same part of the "
            f"model; nearest that does: {_nearest_divisor(replicas, shard)}"
        )
    return {"zero_stage": (zero.stage or 1) if zero.enabled else 0, "shard": shard}


def _pipelining(dist: Any) -> Pipelining:
    """Return how the pipeline runs."""
    schedule, virtual = dist.pipeline_schedule, dist.pipeline_virtual_stages
    if virtual is not None and virtual < 1:
        raise LayoutError(f"train.dist.pipeline_virtual_stages={virtual}: at least 1")
    if virtual is None:
        virtual = 2 if schedule in _SEVERAL_STAGES and dist.pipeline_parallel_size > 1 else 1
    if dist.pipeline_parallel_size == 1:
        return Pipelining(schedule)
    if schedule in _V_SHAPED and virtual != 2:
        raise LayoutError(f"train.dist.pipeline_virtual_stages={virtual}: {schedule} needs exactly 2 stages on each process")
    if schedule not in _SEVERAL_STAGES and virtual != 1:
        raise LayoutError(
            f"train.dist.pipeline_virtual_stages={virtual}: {schedule} has one stage on each process; set it to 1, or "
            f"train.dist.pipeline_schedule to one of {', '.join(_SEVERAL_STAGES)}"
        )
    ids = dist.custom_pipeline_stage_id
    return Pipelining(schedule, virtual, dist.pipeline_num_layers, None if ids is None else tuple(int(i) for i in ids))


def check_model(model: nn.Module, layout: ParallelLayout) -> None:
    """Raise LayoutError, naming the layer and both numbers, when a split layer does not divide over the layout.

    A model may have an objection of its own: its method `check_layout`.
    """
    own = getattr(model, "check_layout", None)
    if own is not None:
        own(layout)
    if layout.tensor == 1:
        return
    if next(split_parameters(model), None) is None:
        raise LayoutError(
            f"train.dist.tensor_parallel_size={layout.tensor} divides layers that say how they may be split, such as dufu.layers.Linear, "
            f"but {type(model).__name__} has none; set it to 1"
        )
    for name, module in model.named_modules():
        check = getattr(module, "check_split", None)
        if check is not None:
            try:
                check(layout.tensor)
            except LayoutError as error:
                raise LayoutError(f"{name}: {error}" if name else str(error)) from None
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
