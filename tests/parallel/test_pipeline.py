"""A pipeline gives the numbers of one process with every schedule, any division of the layers, tied weights and unequal micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dufu.errors import LayoutError
from dufu.parallel.layout import SCHEDULES, ParallelLayout, Pipelining
from dufu.parallel.schedule import schedule_table
from dufu.parallel.stages import balance, check_stage_ids
from tests.parallel.test_parity import distance
from tests.pool import Ranks
from tests.small import TINY, metrics

BASE = [*TINY, "model.cfg.hidden_layers=4", "train.num_accumulation_steps=4"]
PP2 = ["train.dist.pipeline_parallel_size=2"]
ZERO = "train.zero_optimization.enabled=true"
LAYOUTS = {
    **{f"pp2({name})": (2, [*PP2, f"train.dist.pipeline_schedule={name}"]) for name in SCHEDULES},
    "pp4": (4, ["train.dist.pipeline_parallel_size=4"]),
    "pp2 uneven": (2, [*PP2, "train.dist.custom_pipeline_stage_id=[0,0,0,1]"]),
    "dp2xpp2": (4, PP2),
    "tp2xpp2": (4, [*PP2, "train.dist.tensor_parallel_size=2"]),
    "tp2xpp2(zbv)": (4, [*PP2, "train.dist.tensor_parallel_size=2", "train.dist.pipeline_schedule=zbv"]),
    "zero1xpp2(interleaved_zero_bubble)": (4, [*PP2, ZERO, "train.dist.pipeline_schedule=interleaved_zero_bubble"]),
    "zero2xpp2(zbv)": (4, [*PP2, ZERO, "train.zero_optimization.stage=2", "train.dist.pipeline_schedule=zbv"]),
    "zero3xpp2": (4, [*PP2, ZERO, "train.zero_optimization.stage=3"]),
    "zero3xpp2(dualpipev) recompute": (
        4, [*PP2, ZERO, "train.zero_optimization.stage=3", "train.dist.pipeline_schedule=dualpipev", "train.activation_checkpoint.enabled=true"]
    ),
}  # fmt: skip
FAULT_OF = {
    "pp2(1f1b)": "pipeline.scale_gradients",
    "pp4": "pipeline.untied",
    "zero1xpp2(interleaved_zero_bubble)": "pipeline.untied",
}


def run(folder: str, corpus: str, overrides: list[str], fault: str | None = None) -> dict[str, Any]:
    """Train on this rank; return what shows that the work was divided."""
    from contextlib import nullcontext

    from dufu.parallel import faults
    from dufu.training.hooks import Hook
    from dufu.training.run import train

    class Witness(Hook):
        seen: dict[str, Any] = {}  # noqa: RUF012

        def after_step(self, trainer: Any) -> None:
            d = trainer.train_step.distributed
            word = next((i.parameter for i in d.store.infos if i.name == "embedding.word.weight"), None)
            self.seen = {
                "units": [u for u, s in d.stage_of.items() if d.processes.layout.stage_owner(s) == d.processes.pipeline.rank],
                "held": sum(e.tensor.numel() for e in d.store.entries),
                "made": sum(i.parameter.numel() for i in d.infos if not i.parameter.is_meta),
                "sent": d.processes.pipeline.sent["send"],
                "word": None if word is None or word.untyped_storage().size() == 0 else word.detach().double().sum().item(),
                "norm": float(trainer.train_step.grad_norm),
            }

    witness = Witness()
    with faults.inject(fault) if fault else nullcontext():
        train("gpt2_tiny", [*BASE, f"train.output_dir={folder}", *overrides], data=[corpus], hooks=[witness])
    return witness.seen


@pytest.fixture(scope="module")
def one(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one") / "run"
    seen = ranks(1, run, str(folder), str(corpus), [])[0]
    return folder, seen


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_pipeline_equals_one_process(name: str, one: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    size, overrides = LAYOUTS[name]
    seen = ranks(size, run, str(tmp_path / "run"), str(corpus), overrides)
    reference, mine = metrics(one[0]), metrics(tmp_path / "run")
    # fp32 sums in another order
    assert distance(reference, mine, "loss") < 1e-6
    assert distance(reference, mine, "grad_norm") < 1e-5
    assert [r["tokens"] for r in mine] == [r["tokens"] for r in reference]
    assert distance(metrics(one[0], "valid"), metrics(tmp_path / "run", "valid"), "loss") < 1e-6
    for rank in seen:
        assert len(rank["units"]) < 6 and rank["sent"] > 0 and rank["norm"] == seen[0]["norm"]
        assert rank["made"] < one[1]["made"]
    words = {rank["word"] for rank in seen if rank["word"] is not None}
    # ZeRO-3 keeps no weight between steps
    assert len(words) == 1 or "tp2" in name or "zero3" in name  # the copies of the tied weight stay one, to the last bit


@pytest.mark.parametrize("name", FAULT_OF)
def test_a_seeded_fault_turns_parity_red(name: str, one: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    size, overrides = LAYOUTS[name]
    ranks(size, run, str(tmp_path / "run"), str(corpus), overrides, FAULT_OF[name])
    mine = metrics(tmp_path / "run")
    assert distance(metrics(one[0]), mine, "loss") > 1e-6 and distance(metrics(one[0]), mine, "grad_norm") > 1e-5


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_a_schedule_runs_each_micro_batch_once_through_every_stage(schedule: str, processes: int) -> None:
    how = Pipelining(schedule, 2 if schedule in SCHEDULES[2:] else 1)
    for micro in range(1, 10):
        table = schedule_table(how, processes, micro)
        done = [action for actions in table for action in actions]
        assert len(set(done)) == len(done)
        for stage in range(ParallelLayout(pipeline=processes, pipelining=how).stages):
            assert {a.micro for a in done if a.kind == "F" and a.stage == stage} == set(range(micro))
            assert sorted(a.micro for a in done if a.kind in "BI" and a.stage == stage) == list(range(micro))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 0, 1], "places 3 of 4 layers; layers 3 to 3 have no stage"),
        ([0, 0, 1, 1, 1], "5 of 4 layers; 1 too many"),
        ([0, 1, 0, 1], "layer 2 is put on stage 0, before layer 1 on stage 1"),
        ([0, 0, 1, 2], "layer 3 is put on stage 2; there are 2 stages, 0 to 1"),
        ([1, 1, 1, 1], "leaves stage 0 without a layer"),
    ],
)
def test_a_stage_list_that_is_not_complete_is_refused(ids: list[int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_stage_ids(ids, 4, 2)


def test_layers_are_balanced_with_the_head_and_none_is_lost() -> None:
    assert balance([1, 1, 1, 1], 2) == [0, 0, 1, 1]
    assert balance([1] * 10, 3) in ([0] * 4 + [1] * 3 + [2] * 3, [0] * 3 + [1] * 4 + [2] * 3, [0] * 3 + [1] * 3 + [2] * 4)
    assert balance([1, 1, 1, 1, 1, 4], 2) == [0] * 4 + [1] * 2 or balance([1, 1, 1, 1, 1, 4], 2) == [0] * 5 + [1]
    assert len(balance([3] * 30, 4)) == 30 and set(balance([3] * 30, 4)) == {0, 1, 2, 3}
