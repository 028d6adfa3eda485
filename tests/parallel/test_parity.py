"""Any layout gives the numbers of one process: losses, norms and weights, with dropout and accumulation on, the work really divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dufu.parallel import faults
from tests.pool import Ranks
from tests.small import TINY, metrics

LAYOUTS = {
    "dp2": (2, []),
    "tp2": (2, ["train.dist.tensor_parallel_size=2"]),
    "zero1": (2, ["train.zero_optimization.enabled=true"]),
    "zero2": (2, ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=2"]),
    "zero3": (2, ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"]),
    "dp3": (3, []),
    "dp2xtp2": (4, ["train.dist.tensor_parallel_size=2"]),
    "zero1xtp2": (4, ["train.dist.tensor_parallel_size=2", "train.zero_optimization.enabled=true"]),
    "zero3xtp2": (
        4, ["train.dist.tensor_parallel_size=2", "train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"]
    ),
}  # fmt: skip
FAULT_OF = {
    "dp2": "data.skip_reduce", "tp2": "tensor.skip_leave", "zero2": "shard.scale", "zero3": "shard.scale", "dp2xtp2": "tensor.skip_enter",
}  # fmt: skip


def run(folder: str, corpus: str, overrides: list[str], fault: str | None = None) -> dict[str, Any]:
    """Train on this rank; return what shows that the work was divided."""
    from contextlib import nullcontext

    from dufu.training.hooks import Hook
    from dufu.training.run import train

    class Witness(Hook):
        seen: dict[str, Any] = {}  # noqa: RUF012

        def after_step(self, trainer: Any) -> None:
            distributed = trainer.train_step.distributed
            self.seen = {
                "rows": sum(b.input_ids.shape[0] for b in trainer.batches._read(trainer.step, trainer.consumed)),
                "qkv": tuple(distributed.model.layers[0].block.attention.query_key_value.weight.shape),
                "held": sum(e.tensor.numel() for e in distributed.store.entries),
                "sent": {c.name: dict(c.sent) for c in (distributed.processes.data, distributed.processes.tensor)},
            }

    witness = Witness()
    with faults.inject(fault) if fault else nullcontext():
        train("gpt2_tiny", [*TINY, f"train.output_dir={folder}", "train.num_accumulation_steps=2", *overrides], data=[corpus],
              hooks=[witness])  # fmt: skip
    return witness.seen


@pytest.fixture(scope="module")
def one(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one") / "run"
    seen = ranks(1, run, str(folder), str(corpus), [])[0]
    return metrics(folder), seen


def distance(a: list[dict[str, Any]], b: list[dict[str, Any]], key: str) -> float:
    assert [r["step"] for r in a] == [r["step"] for r in b]
    return max(abs(x[key] - y[key]) / abs(x[key]) for x, y in zip(a, b))


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_norms_equal_one_process(name: str, one: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    size, overrides = LAYOUTS[name]
    seen = ranks(size, run, str(tmp_path / "run"), str(corpus), overrides)
    mine = metrics(tmp_path / "run")
    # fp32 sums in another order: about 1e-7 a step, growing slowly
    assert distance(one[0], mine, "loss") < 1e-5
    assert distance(one[0], mine, "grad_norm") < 1e-4
    assert [r["samples"] for r in mine] == [r["samples"] for r in one[0]]
    assert [r["tokens"] for r in mine] == [r["tokens"] for r in one[0]]
    whole = one[1]
    for rank in seen:
        if "tp2" in name:
            assert rank["qkv"][0] == whole["qkv"][0] // 2
            assert rank["sent"]["tensor"]["all_reduce"] > 0
        if "zero" in name:
            assert rank["held"] < 0.6 * whole["held"]
            assert rank["sent"]["data"]["reduce_scatter"] > 0 and rank["sent"]["data"]["all_gather"] > 0
        elif name != "tp2":
            assert rank["sent"]["data"]["all_reduce"] > 0
        if name != "tp2":
            assert rank["rows"] < whole["rows"]


@pytest.mark.parametrize("name", FAULT_OF)
def test_a_seeded_fault_turns_parity_red(name: str, one: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    size, overrides = LAYOUTS[name]
    ranks(size, run, str(tmp_path / "run"), str(corpus), overrides, FAULT_OF[name])
    mine = metrics(tmp_path / "run")
    assert distance(one[0], mine, "loss") > 1e-5 or distance(one[0], mine, "grad_norm") > 1e-4
