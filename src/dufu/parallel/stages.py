"""Which stage of a pipeline runs which unit of the chain: as the user lists it, or balanced by counted cost."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from torch import nn

from dufu.errors import LayoutError
from dufu.layers.attention import Attention
from dufu.layers.head import LMLogits
from dufu.layers.linear import Linear
from dufu.layers.moe import MixtureOfExperts
from dufu.parallel.layout import ParallelLayout

_LAYER = re.compile(r"\.\d+$")


def assign_stages(model: nn.Module, units: dict[str, nn.Module], layout: ParallelLayout) -> dict[str, int]:
    """Return the stage of each unit, non-decreasing along the chain and complete: every stage has a layer of its own.

    Units whose name ends in a number are layers. What lies before the first layer runs in the first stage, what follows the last layer
    in the last one, and what lies between two layers with the one that follows.

    Raises:
        LayoutError: fewer layers than stages, or a list that is not non-decreasing and complete; the message shows what is missing.
    """
    if layout.stages == 1:
        return dict.fromkeys(units, 0)
    names = list(units)
    layers = [name for name in names if _LAYER.search(name)]
    how, count = layout.pipelining, len(layers)
    if how.num_layers is not None and how.num_layers != count:
        raise LayoutError(
            f"train.dist.pipeline_num_layers={how.num_layers}, but the model has {count} layers; set it to {count} or null"
        )
    if not layers:
        raise LayoutError(
            f"train.dist.pipeline_parallel_size={layout.pipeline} divides the layers of a ChainModel, its units whose names end in a "
            f"number, but {type(model).__name__} has none; set it to 1"
        )
    if count < layout.stages:
        virtual = f" × {how.virtual} stages on each" if how.virtual > 1 else ""
        raise LayoutError(
            f"train.dist.pipeline_parallel_size={layout.pipeline}{virtual}: {count} layers cannot fill {layout.stages} stages; "
            f"at most {count} stages"
        )
    if how.stage_ids is not None:
        check_stage_ids(how.stage_ids, count, layout.stages)
        ids = list(how.stage_ids)
    else:
        ids = balance(_layer_costs(model, units, layers), layout.stages)
    return _of_all_units(names, dict(zip(layers, ids)), layout.stages)


def _of_all_units(names: list[str], stage_of: dict[str, int], stages: int) -> dict[str, int]:
    out: dict[str, int] = {}
    following = stages - 1
    for name in reversed(names):
        following = stage_of.get(name, following)
        out[name] = following
    first = next(i for i, name in enumerate(names) if name in stage_of)
    out.update(dict.fromkeys(names[:first], 0))
    return {name: out[name] for name in names}


def check_stage_ids(ids: Sequence[int], layers: int, stages: int) -> None:
    """Raise LayoutError unless a list names a stage for each layer, in order, and leaves no stage out."""
    key = "train.dist.custom_pipeline_stage_id"
    if len(ids) != layers:
        missing = f"; layers {len(ids)} to {layers - 1} have no stage" if len(ids) < layers else f"; {len(ids) - layers} too many"
        raise LayoutError(f"{key} places {len(ids)} of {layers} layers{missing}")
    for layer, stage in enumerate(ids):
        if not 0 <= stage < stages:
            raise LayoutError(f"{key}: layer {layer} is put on stage {stage}; there are {stages} stages, 0 to {stages - 1}")
        if layer and stage < ids[layer - 1]:
            raise LayoutError(f"{key}: layer {layer} is put on stage {stage}, before layer {layer - 1} on stage {ids[layer - 1]}")
    empty = [stage for stage in range(stages) if stage not in ids]
    if empty:
        raise LayoutError(f"{key} leaves stage {', '.join(map(str, empty))} without a layer; there are {stages} stages")


def unit_cost(unit: nn.Module, length: int) -> int:
    """Return the multiplications of one token's forward through a unit: its matrix products, the head's and attention's."""
    total = 0
    for module in unit.modules():
        if isinstance(module, Linear):
            total += module.in_features * module.out_features
        elif isinstance(module, Attention):
            total += 2 * module.heads * module.head_size * length
        elif isinstance(module, MixtureOfExperts):
            total += module.cost
        elif isinstance(module, nn.Linear):
            total += module.weight.numel()
    vocabulary = [m.vocab_size for m in unit.modules() if isinstance(m, LMLogits)]
    widths = [p.shape[1] for p in unit.parameters() if p.dim() == 2 and p.shape[0] in vocabulary]
    return total + sum(vocabulary) * max(widths, default=0)


def _layer_costs(model: nn.Module, units: dict[str, nn.Module], layers: list[str]) -> list[int]:
    """Return the cost of each layer, that of the units that run in its stage for certain (embedding, head) included."""
    length = int(getattr(model, "max_seq_length", 0))
    costs = dict.fromkeys(layers, 0)
    following = layers[-1]
    for name in reversed(list(units)):
        following = name if name in costs else following
        tokens = int(getattr(units[name], "tokens", 1))  # where units see unequal numbers of them, each says its own
        costs[following] += unit_cost(units[name], length) * tokens
    return [costs[name] for name in layers]


def balance(costs: Sequence[int], stages: int) -> list[int]:
    """Return the stage of each layer: contiguous, none empty, the dearest stage as cheap as can be, and then the next dearest.

    Minimises the sum of squares among the divisions whose dearest stage is cheapest.
    """
    count = len(costs)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[s][i]: (dearest, sum of squares, where the last stage begins) of the first i layers on s stages
    none = (math.inf, math.inf, 0)
    best: list[list[tuple[float, float, int]]] = [[none] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0, 0, 0)
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                dearest, squares, _ = best[stage - 1][start]
                cost = sums[end] - sums[start]
                best[stage][end] = min(best[stage][end], (max(dearest, cost), squares + cost * cost, start))
    ids: list[int] = []
    end = count
    for stage in range(stages, 0, -1):
        start = best[stage][end][2]
        ids = [stage - 1] * (end - start) + ids
        end = start
    return ids
