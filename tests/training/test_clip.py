"""One global gradient norm: each element once, of true gradients, applied once an update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Ranks


class Tiny(nn.Module):
    """Weights whose gradients are the batch: loss = Σ weight · batch, scored as one token a step."""

    objectives = {"loss": "tokens"}  # noqa: RUF012

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def counts(self, batch: Tensor) -> dict[str, float]:
        return {"tokens": 0.5}  # two micro-batches make one token, so that their gradients are simply added

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.weight * batch).sum(), "tokens": torch.ones(())}


def step_of(gradients: list[list[float]], clip: float, kind: str, scale: float | None, stage: int = 0, norm: float = 2.0) -> Any:
    """Make one update with rate 1 on this rank; return (reported norm, minus the change of the weights, whether it was skipped)."""
    from types import SimpleNamespace

    from dufu import optim
    from dufu.parallel.build import distribute
    from dufu.parallel.layout import ParallelLayout
    from dufu.parallel.process import join, world_size
    from dufu.training.precision import LossScaler, Precision
    from dufu.training.step import TrainStep

    size = world_size()
    processes = join(ParallelLayout(size, 1, stage), torch.device("cpu"))
    distributed = distribute(lambda: Tiny(len(gradients[0])), processes, lambda m: [{"params": list(m.parameters())}], seed=1)
    make = {"fused": lambda g: optim.SGD(g, lr=1.0), "plain": lambda g: torch.optim.SGD(g, lr=1.0)}[kind]
    optimizer = make(distributed.groups)
    amp = SimpleNamespace(init_scale=scale, growth_interval=100, min_scale=1.0, max_skips_at_floor=5)
    scaler = None if scale is None else LossScaler(amp)
    schedule = optim.ConstantLR(optimizer, 1)
    step = TrainStep(distributed, optimizer, schedule, Precision("O0", torch.bfloat16), scaler, clip, norm)
    mine = gradients[processes.rank :: size]
    step(0, [torch.tensor(g) for g in mine])
    if stage == 3:
        for flat in distributed.store.flats:
            flat.ensure()
    moved = [-x for x in distributed.model.weight.detach().tolist()]
    return float(step.grad_norm), moved, step.skipped


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_clipped_once_an_update_not_each_micro_batch(kind: str, ranks: Ranks) -> None:
    # B046: [3, 0] + [0, 4], limit 1; clipped at each micro-batch it would be [0.243, 0.970]
    norm, moved, _ = ranks(1, step_of, [[3.0, 0.0], [0.0, 4.0]], 1.0, kind, None)[0]
    assert norm == pytest.approx(5.0)
    assert moved == pytest.approx([0.6, 0.8], rel=1e-5)


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_the_loss_scale_is_removed_before_the_norm(kind: str, ranks: Ranks) -> None:
    # B043: a true gradient of 0.5, scale 65536, limit 1: nothing is clipped
    norm, moved, _ = ranks(1, step_of, [[0.5], [0.0]], 1.0, kind, 65536.0)[0]
    assert (norm, moved) == (pytest.approx(0.5), pytest.approx([0.5]))
    norm, moved, _ = ranks(1, step_of, [[3.0, 0.0], [0.0, 4.0]], 1.0, kind, 65536.0)[0]
    assert (norm, moved) == (pytest.approx(5.0), pytest.approx([0.6, 0.8], rel=1e-5))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_norm_over_sharded_gradients(stage: int, ranks: Ranks) -> None:
    # B040 over data-parallel shards: with ZeRO each process owns one of the two numbers, and both clip by the norm of both
    for norm, moved, _ in ranks(2, step_of, [[3.0, 0.0], [0.0, 4.0]], 1.0, "fused", None, stage):
        assert norm == pytest.approx(5.0)
        assert moved == pytest.approx([0.6, 0.8], rel=1e-5)


@pytest.mark.parametrize(("norm", "value"), [(1.0, 7.0), (2.0, 5.0), (math.inf, 4.0)])
@pytest.mark.parametrize("stage", [0, 2])
def test_other_norms(norm: float, value: float, stage: int, ranks: Ranks) -> None:
    for found, _, _ in ranks(2, step_of, [[3.0, 0.0], [0.0, -4.0]], 0.0, "fused", None, stage, norm):
        assert found == pytest.approx(value)


@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_a_number_that_is_none_on_one_process_skips_the_update_on_all(norm: float, ranks: Ranks) -> None:
    # with ZeRO the second process owns the second element; a maximum over processes must not lose its NaN
    for rows in ([[1.0, 0.0], [1.0, math.nan]], [[math.inf, 0.0], [1.0, 1.0]]):
        for found, moved, skipped in ranks(2, step_of, rows, 1.0, "fused", None, 2, norm):
            assert not math.isfinite(found)
            assert skipped and moved == [0.0, 0.0]


def tensor_norm(p: float) -> float:
    """Return the norm where rank r of a tensor-parallel pair holds a replicated gradient 3 and the divided pieces 4 and 0."""
    from types import SimpleNamespace

    from dufu.parallel.layout import ParallelLayout
    from dufu.parallel.process import join
    from dufu.training.clip import global_norm

    processes = join(ParallelLayout(1, 2), torch.device("cpu"))
    replicated, divided = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    replicated.grad = torch.tensor([3.0])
    divided.grad = torch.tensor([4.0 if processes.tensor.rank == 0 else 0.0])
    entries = [
        SimpleNamespace(tensor=replicated, counted=processes.tensor.rank == 0),
        SimpleNamespace(tensor=divided, counted=True),
    ]
    return float(global_norm(SimpleNamespace(entries=entries, sharded=False), processes, p))


@pytest.mark.parametrize(("p", "value"), [(2.0, 5.0), (1.0, 7.0), (math.inf, 4.0)])
def test_replicated_gradients_count_once_over_tensor_parallel_processes(p: float, value: float, ranks: Ranks) -> None:
    # B041: 5.83 if the replicated one counted twice
    assert ranks(2, tensor_norm, p) == [pytest.approx(value), pytest.approx(value)]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_the_norm_of_a_long_gradient_is_that_of_its_parts(norm_type: float) -> None:
    """PyTorch's own norm of so many float32 numbers is wrong in the fourth digit, by more the longer the tensor is."""
    from types import SimpleNamespace

    from dufu.training.clip import global_norm

    torch.manual_seed(0)
    gradient = torch.randn(3_000_001) * torch.rand(3_000_001) ** 4
    exact = float(torch.linalg.vector_norm(gradient.double(), norm_type))

    def norm_of(parts: list[Tensor]) -> float:
        entries = [SimpleNamespace(tensor=SimpleNamespace(grad=part), counted=True) for part in parts]
        store = SimpleNamespace(entries=entries, sharded=False)
        processes: Any = SimpleNamespace(layout=SimpleNamespace(tensor=1, pipeline=1, expert=1), device=torch.device("cpu"))
        return float(global_norm(store, processes, norm_type))  # type: ignore[arg-type]

    whole, cut = norm_of([gradient]), norm_of([*gradient.split(700_123), torch.empty(0)])
    assert abs(whole - exact) < 1e-6 * exact
    assert abs(cut - whole) < 1e-6 * exact
