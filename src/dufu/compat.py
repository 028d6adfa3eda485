"""The only place that touches private PyTorch names; each has a test, so that a new release that moves one is noticed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def storage_identity(tensor: Tensor) -> int:
    """Return a number that two tensors share exactly when they lie in one storage, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


def compiled_graphs() -> int:
    """Return how many pieces of code torch.compile has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


Computations = dict[int, list[tuple[str, int, int]]]  # (kind, stage, micro-batch) of each process of a pipeline, in order


def pipeline_computations(name: str, processes: int, virtual: int, micro_batches: int) -> Computations:
    """Return what each process computes in PyTorch's schedule for several stages a process.

    Args:
        name: as `get_schedule_class` knows it.
        processes, virtual: of the pipeline, and stages on each.
    """
    from torch.distributed.pipelining import schedules

    stages = [
        SimpleNamespace(
            stage_index=index, num_stages=processes * virtual, group_size=processes, group_rank=0, group=None, is_first=index == 0,
            is_last=False, has_backward=True, submod=torch.nn.Module(), stage_index_to_group_rank={},
        )
        for index in range(virtual)
    ]  # fmt: skip
    cls: Any = schedules.get_schedule_class(name)
    order = cls(stages, micro_batches).pipeline_order
    parts = {rank: [part for a in actions if a is not None for part in (a.sub_actions or (a,))] for rank, actions in order.items()}
    return {
        rank: [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in actions] for rank, actions in parts.items()
    }


def with_messages(computations: Computations, owner: Callable[[int], int], stages: int) -> Computations:
    """Return a schedule with the messages between stages, placed so that no two processes wait for each other.

    Args:
        owner: which process runs a stage.
        stages: of the pipeline.
    """
    from torch.distributed.pipelining import schedules

    def action(kind: str, stage: int, micro: int) -> Any:
        return schedules._Action(stage, schedules._ComputationType(kind), micro)

    lowered = schedules._add_send_recv({rank: [action(*a) for a in some] for rank, some in computations.items()}, owner, stages)
    return {
        rank: [(a.computation_type.value, a.stage_index, int(a.microbatch_index or 0)) for a in some]
        for rank, some in lowered.items()
    }


def backward_to_inputs(outputs: list[Tensor], grads: list[Tensor], inputs: list[Tensor], weights: list[Tensor]) -> Any:
    """Run the part of backward that the inputs need, leaving their `.grad`; return what `backward_to_weights` goes on from."""
    from torch.distributed.pipelining._backward import stage_backward_input

    # It detaches the outputs in place, which neither views nor inputs that are passed on allow.
    outputs = [o.clone() if o.is_leaf or o._is_view() else o for o in outputs]
    _, groups = stage_backward_input(outputs, grads, inputs, iter(weights))  # type: ignore[arg-type]
    return groups


def backward_to_weights(weights: list[Tensor], groups: Any) -> None:
    """Run the rest of a backward that `backward_to_inputs` began; gradients are added to the weights'."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    # Groups of weights may share nodes, where a stage hands on several tensors; what is retained goes with the last reference to it.
    stage_backward_weight(iter(weights), groups, retain_graph=True)  # type: ignore[arg-type]


def attention_block(q: Tensor, k: Tensor, v: Tensor, triangle: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return softmax(q kᵀ · scale) v over a block of keys and the logarithms of its sums of exponentials, by PyTorch's kernel for the CPU.

    Args:
        q: (B, H, T, D); k, v: (B, H, S, D).
        triangle: whether query i sees the keys 0 … i only.

    Returns:
        (B, H, T, D), and (B, H, T) float32.
    """
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, triangle, scale=scale)
    return out, sums


def attention_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, triangle: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's share of the gradients of q, k and v.

    Args:
        grad: of the output over all blocks.
        out, sums: output and logarithms of the sums of exponentials over all blocks.
    """
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_q, of_k, of_v = backward(grad, q, k, v, out, sums, 0.0, triangle, scale=scale)
    return of_q, of_k, of_v


def after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward that is running has ended; to be asked for from within it."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]
