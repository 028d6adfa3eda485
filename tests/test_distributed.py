"""The public face for several processes: the example of the documentation, and modules of a user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dufu import distributed
from dufu.errors import LayoutError
from dufu.layers import Linear, VocabEmbedding
from tests.pool import Ranks

EXAMPLE = Path(__file__).parent.parent / "examples" / "mlp_two_processes.py"


def run_example(*launcher: str) -> tuple[str, list[str]]:
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, sorted(line for line in done.stderr.splitlines() if line.startswith("process "))


def test_the_two_layer_mlp_gives_the_same_output_on_one_process_and_on_two() -> None:
    one, whole = run_example()
    two, halves = run_example("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    assert one == two and len(one.splitlines()) == 3
    assert whole == ["process 0 of 1 holds (32, 8) of (32, 8)"]
    assert halves == [f"process {rank} of 2 holds (16, 8) of (32, 8)" for rank in range(2)]


class Tied(nn.Module):
    """A user's own model: a word table and a head that are one parameter, and a plain layer of PyTorch's between them."""

    def __init__(self, words: int = 11) -> None:
        super().__init__()
        self.words = VocabEmbedding(words, 8)
        self.middle = nn.Linear(8, 8)
        self.expand = Linear(8, 12, parallel="col")
        self.contract = Linear(12, 8, parallel="row")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.contract(torch.tanh(self.expand(self.middle(self.words(ids)))))
        return y


def steps(seed_by_rank: bool) -> dict[str, Any]:
    """Three updates of plain SGD; return the losses, and this process's shapes."""
    torch.manual_seed(distributed.rank() if seed_by_rank else 0)
    model = distributed.parallelize(Tied())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for _ in range(3):
        loss = (model(torch.arange(11)) - torch.linspace(-1, 1, 88).view(11, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses, "middle": model.middle.weight.detach().clone(),
        "shapes": [tuple(p.shape) for p in (model.words.weight, model.expand.weight, model.contract.weight)],
        "main": distributed.is_main_process(), "world": distributed.world_size(),
    }  # fmt: skip


def test_a_module_of_ones_own_trains_alike_from_the_weights_of_process_0(ranks: Ranks) -> None:
    whole = ranks(1, steps, False)[0]
    parts = ranks(2, steps, True)  # each process draws other weights; those of process 0 count
    for part in parts:
        assert part["losses"] == pytest.approx(whole["losses"], rel=1e-5)  # fp32 sums in another order
        torch.testing.assert_close(part["middle"], whole["middle"], rtol=1e-5, atol=1e-6)
        assert part["shapes"] == [(6, 8), (6, 8), (8, 6)] and part["world"] == 2
    assert torch.equal(parts[0]["middle"], parts[1]["middle"])
    assert [part["main"] for part in parts] == [True, False]


def test_another_number_of_processes_than_asked_is_an_error_that_names_both() -> None:
    with pytest.raises(LayoutError, match=r"tensor_parallel_size=2, but 1 processes.*torchrun --nproc_per_node 2"):
        distributed.parallelize(Tied(), tensor_parallel_size=2)


def refused(case: str) -> str:
    model = Tied()
    if case == "width":
        model.expand = Linear(8, 13, parallel="col")
    elif case == "half tied":
        model.middle.weight = model.contract.weight = nn.Parameter(torch.zeros(8, 8))
    else:
        model.expand.weight = model.contract.weight = nn.Parameter(torch.zeros(8, 8))
    try:
        distributed.parallelize(model)
    except LayoutError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("width", "expand.weight: 13 does not divide over tensor_parallel_size=2"),
        ("half tied", "contract.weight and middle.weight are one parameter, but only the first layer splits it"),
        ("two ways", "expand.weight and contract.weight are one parameter, but the two layers split it in different ways"),
    ],
)
def test_a_module_that_cannot_be_divided_is_an_error_on_every_process(case: str, said: str, ranks: Ranks) -> None:
    assert all(said in answer for answer in ranks(2, refused, case))


def threads_after_leaving() -> tuple[int, int]:
    before = len(os.listdir("/proc/self/task"))
    model = distributed.parallelize(Tied())
    model(torch.arange(11)).sum().backward()
    distributed.leave()
    return before, len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux shows them")
def test_leaving_ends_the_threads_that_carry_messages(ranks: Ranks) -> None:
    """A thread that outlives the group aborts the process now and then while the interpreter ends."""
    for before, after in ranks(2, threads_after_leaving):
        assert after <= before
