"""`check` finds what makes a layout differ from one process, and says where it begins and why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import dufu
from dufu.errors import DufuError
from dufu.layers import Linear
from dufu.parallel.layout import ParallelLayout
from dufu.parallel.pool import Pool
from dufu.parity.check import Finding, check_config
from dufu.parity.comparison import TOLERANCES, compare
from dufu.parity.diagnosis import explain
from dufu.parity.recording import Recording, UnitPrint
from dufu.parity.report import as_markdown, explanations
from tests.pool import Ranks

TINY = ["model.cfg.hidden_size=32", "model.cfg.ffn_hidden_size=64", "model.cfg.max_seq_length=24"]
FP32 = TOLERANCES["O0"]


def with_fault(fault: str, function: Callable[..., Any], *arguments: Any) -> Any:
    from dufu.parallel import faults

    with faults.inject(fault):
        return function(*arguments)


class FaultyPool(Pool):
    """The session's pool, with a fault in every layout but one process."""

    def __init__(self, pool: Pool, fault: str) -> None:
        self.pool, self.fault = pool, fault

    def grow(self, size: int) -> None:
        self.pool.grow(size)

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
        if size == 1:
            return self.pool(size, function, *arguments, timeout=timeout)
        return self.pool(size, with_fault, self.fault, function, *arguments, timeout=timeout)


FAULTS = {
    # fault: model, layout, where it begins, likely reason
    "data.skip_reduce": ("bert_tiny", "dp2", "first parameter: embedding.word.weight", "sum missing: the data-parallel processes"),
    "tensor.skip_leave": ("gpt2_tiny", "tp2", "first unit: embedding, whose output", "sum missing: the tensor-parallel processes"),
    "tensor.skip_enter": ("gpt2_tiny", "tp2", "first unit: head, the gradient of layers.1", "sum missing: the tensor-parallel"),
    "shard.scale": ("gpt2_tiny", "zero2", "first parameter: embedding.word.weight", "scale: the gradient is 1/2 times"),
    "data.double": ("gpt2_tiny", "dp2", "first parameter: embedding.word.weight", "scale: the gradient is 2 times"),
    "pipeline.scale_gradients": ("gpt2_tiny", "pp2", "the gradient of layers.1's output", "scale: the gradient of the output is 1/5 times"),
    "pipeline.untied": ("gpt2_tiny", "pp2", "first parameter: embedding.word.weight", "untied copy: the pipeline's processes"),
    "sequence.skip_gradient_sum": (
        "gpt2_tiny", "sp", "first parameter: embedding.position.weight", "sum missing: the tensor-parallel processes"
    ),
    "sequence.skip_scatter": ("gpt2_tiny", "sp", "first unit: layers.1, the gradient of layers.0's output", "sum missing"),
    "sequence.first_stretch": ("gpt2_tiny", "sp", "first unit: embedding", "positions shifted"),
    "context.shifted_positions": ("gpt2_tiny", "cp2", "first unit: embedding", "positions shifted"),
    "context.dropout_by_rank": ("gpt2_tiny", "cp2", "first unit: embedding", "random state: with dropout switched off it agrees"),
    "context.order_of_ranks": ("gpt2_tiny", "cp2", "first unit: layers.0, whose output", "order"),
    "expert.wrong_order": ("gpt2_moe_tiny", "ep2", "first unit: layers.0, whose output", "order"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found_and_named(fault: str, ranks: Ranks) -> None:
    model, layout, where, reason = FAULTS[fault]
    report = check_config(model, TINY, layouts=layout, pool=FaultyPool(ranks.pool, fault))
    assert not report.agrees
    text = explanations(report)[0]
    assert where in text and f"Likely reason: {reason}" in text and text in as_markdown(report)


def test_an_optimizer_that_sees_only_its_part_is_named(ranks: Ranks) -> None:
    report = check_config("gpt2_tiny", [*TINY, "optim=lamb"], layouts="tp2", pool=FaultyPool(ranks.pool, "optim.skip_sum"))
    comparison = report.findings[0].comparison
    assert comparison is not None and not any(d.counts for d in comparison.gradients)
    assert (
        "first parameter: embedding.word.weight, whose value" in explanations(report)[0]
        and "the optimizer" in explanations(report)[0]
    )


def recording(**gradients: Tensor) -> Recording:
    return Recording(steps=[{"loss": 1.0}], gradients=gradients)


def reason(right: Recording, wrong: Recording, layout: ParallelLayout) -> str:
    comparison = compare(right, wrong, FP32)
    assert not comparison.agrees
    return explain(right, wrong, comparison, layout, FP32)


def test_permuted_rows_and_columns_are_told_from_other_errors() -> None:
    weight, tensor2 = torch.randn(6, 8), ParallelLayout(tensor=2)
    assert "the rows of the gradient of w are permuted" in reason(
        recording(w=weight), recording(w=weight[[3, 4, 5, 0, 1, 2]]), tensor2
    )
    assert "the columns of the gradient" in reason(recording(w=weight), recording(w=weight.roll(4, 1)), tensor2)
    assert "scale: the gradient is 3 times" in reason(recording(w=weight), recording(w=3 * weight), tensor2)
    assert "unknown" in reason(recording(w=weight), recording(w=torch.randn(6, 8)), tensor2)


def test_tokens_in_another_order_and_missing_tokens_are_named() -> None:
    samples, positions = torch.arange(2).repeat_interleave(8), torch.arange(8).repeat(2)
    values, rank = torch.randn(16, dtype=torch.float64), torch.zeros(16, dtype=torch.int64)

    def units(values: Tensor, keep: int = 16) -> Recording:
        found = UnitPrint(samples[:keep], positions[:keep], rank[:keep], values[:keep])
        return Recording(steps=[{"loss": 1.0}], forward={"embedding": found}, units=["embedding"])

    shuffled = values.view(2, 8)[:, [4, 5, 6, 7, 0, 1, 2, 3]].reshape(-1)
    assert "rows are permuted" in reason(units(values), units(shuffled), ParallelLayout(context=2))
    assert "tokens are missing" in reason(units(values), units(values, 12), ParallelLayout(data=2))
    assert "scale: the output is 2 times" in reason(units(values), units(2 * values), ParallelLayout(data=2))


def test_what_is_no_number_counts_as_a_difference() -> None:
    nan = recording(w=torch.full((2, 2), torch.nan))
    assert not compare(recording(w=torch.ones(2, 2)), nan, FP32).agrees
    assert not compare(Recording(steps=[{"loss": 1.0}]), Recording(steps=[{"loss": float("nan")}]), FP32).agrees


def test_a_recording_of_another_framework_is_compared_as_far_as_it_goes(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "reference"
    assert check_config("gpt2_tiny", TINY, layouts="tp2", save_reference=folder, pool=ranks.pool).agrees
    # The batch and the text are those of the recording, though for three processes others would be made.
    assert check_config("gpt2_tiny", TINY, layouts="dp3", reference=folder, pool=ranks.pool).agrees
    with pytest.raises(DufuError, match="holds parameters after 3 steps; give --steps 3"):
        check_config("gpt2_tiny", TINY, layouts="dp3", reference=folder, steps=5, pool=ranks.pool)
    # Another program wrote losses and some gradients, and nothing else.
    for name in ("parameters", "units"):
        (folder / f"{name}.safetensors").unlink()
    report = check_config("gpt2_tiny", TINY, layouts="tp2", reference=folder, pool=ranks.pool)
    assert report.agrees and str(folder) in report.facts["compared with"]
    gradients = load_file(folder / "gradients.safetensors")
    gradients["layers.1.block.mlp.expand.weight"] *= 1.001
    save_file(gradients, folder / "gradients.safetensors")
    report = check_config("gpt2_tiny", TINY, layouts="tp2", reference=folder, pool=ranks.pool)
    assert not report.agrees and "first parameter: layers.1.block.mlp.expand.weight" in explanations(report)[0]
    with pytest.raises(DufuError, match="holds a recording already"):
        check_config("gpt2_tiny", TINY, layouts="tp2", save_reference=folder, pool=ranks.pool)


def test_half_precision_and_recomputation_are_compared_with_one_process_of_the_same_precision(ranks: Ranks) -> None:
    report = check_config("gpt2_tiny", TINY, layouts="tp2:O1,dp2:O2+recompute,one:selective", pool=ranks.pool)
    assert report.agrees and [f.tolerance for f in report.findings] == [TOLERANCES["O1"], TOLERANCES["O2"], FP32]
    assert FP32.text() in as_markdown(report)


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ("dp2,tpp2", 'layout "tpp2": "tpp2" is no factor; did you mean "tp2"'),
        ("dp2,tp3", "layout tp3: .*4 attention heads do not divide over tensor_parallel_size=3; the nearest size that fits is 2"),
        ("dp2,pp4", "layout pp4: .*2 layers cannot fill 4 stages"),
        ("dp2,ep2", "layout ep2: .*GPT2 has none"),
        ("dp2,dp2", 'names "dp2" twice'),
        ("", "names no layout"),
        ("dp2:train.batch=3", "layout dp2:train.batch=3: .*train.batch"),
    ],
)
def test_a_mistake_is_said_before_any_work(layouts: str, message: str) -> None:
    class Untouched(Pool):
        def grow(self, size: int) -> None:
            raise AssertionError("processes were started")

    with pytest.raises(DufuError, match=message):
        check_config("gpt2_tiny", TINY, layouts=layouts, pool=Untouched())


class Classifier(nn.Module):
    """A plain module of dufu's layers that returns a loss for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Linear(8, 16, parallel="col"), Linear(16, 3, parallel="row")
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.b(torch.relu(self.a(x))) * self.scale, y, reduction="none")


class TotalOverBatch(nn.Module):
    """Returns what is no mean over samples: its loss depends on the batch's size."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.a(x), y, reduction="sum")


class Dropping(nn.Module):
    """PyTorch's dropout, which draws from the generator of each process."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(8, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.a(self.drop(x)), y)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


X, Y = torch.randn(7, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2, 0])


def test_any_module_can_be_checked(ranks: Ranks) -> None:
    report = dufu.check(Classifier(), (X, Y), ["dp2", "zero3", "tp2", "dp2xtp2", "one:micro2"], pool=ranks.pool)
    assert report and "| tp2 | 2 |" in str(report)
    assert report.findings[2].witnesses[0]["shapes"]["a.weight"] == [8, 8]  # (in, out / 2) or (out / 2, in)
    named = dufu.check(Classifier(), {"x": X, "y": Y}, "dp2", pool=ranks.pool)
    assert named.agrees


def test_the_children_of_a_sequential_are_stages(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    report = dufu.check(model, (X, Y), "pp2,pp2(zbv),dp2xpp2,zero3:recompute", loss=mean_loss, pool=ranks.pool)
    assert report and report.findings[0].witnesses[0]["units"] != report.findings[0].witnesses[1]["units"]
    with pytest.raises(DufuError, match=r"layout pp8: .*5 layers cannot fill 8 stages"):
        dufu.check(model, (X, Y), "pp8", loss=mean_loss, pool=ranks.pool)


def test_a_loss_that_is_no_mean_over_samples_is_named(ranks: Ranks) -> None:
    report = dufu.check(TotalOverBatch(), (X, Y), "dp2", pool=ranks.pool)
    assert "normalisation: the loss differs though no unit's output does" in explanations(report)[0]


def test_dropout_of_each_process_is_named(ranks: Ranks) -> None:
    report = dufu.check(Dropping(), (X, Y), "dp2", pool=ranks.pool)
    assert "random state" in explanations(report)[0]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Classifier(), (X, Y[:3])), {}, "as many samples in the first dimension"),
        ((Classifier(), X), {"loss": mean_loss}, "loss= needs a target"),
        ((Classifier(), (X, Y)), {"layouts": "sp"}, "a plain module has dp, zero, tp, ep and pp"),
        ((Classifier(), (X, Y)), {"layouts": "dp2:model.cfg.x=1"}, "settings of train and graph only"),
        ((Classifier(), (X, Y)), {"loss": lambda a, b: a, "layouts": "dp2"}, "define them at the top of a file"),
        (("gpt2_tiny", (X, Y)), {}, "batch and loss go with a module"),
    ],
)
def test_a_wrong_call_is_refused(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(DufuError, match=message):
        dufu.check(*arguments, **options)


def test_two_parameters_on_one_tensor_are_refused(ranks: Ranks) -> None:
    model = Classifier()
    model.b.weight = nn.Parameter(model.a.weight.detach().view(-1)[:48].view(3, 16))
    with pytest.raises(DufuError, match="are two parameters on one tensor"):
        dufu.check(model, (X, Y), "dp2", pool=ranks.pool)


def test_a_failing_process_ends_its_layout_with_one_line(ranks: Ranks) -> None:
    report = dufu.check(Failing(), (X, Y), "dp2", pool=ranks.pool)
    finding: Finding = report.findings[0]
    assert not report and finding.failure.startswith("process ") and "ValueError: no second process" in finding.failure
    assert "\n" not in finding.failure and finding.failure in str(report)


class Failing(nn.Module):
    """Works on one process only."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if len(x) < 7:
            raise ValueError("no second process\nand more lines")
        return functional.cross_entropy(self.a(x), y)


def test_a_script_checks_its_own_module(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch, dufu\n"
        "class Mine(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a = torch.nn.Linear(4, 1)\n"
        "    def forward(self, x):\n"
        "        return self.a(x).square().mean(1)\n"
        'if __name__ == "__main__":\n'
        '    print(bool(dufu.check(Mine(), torch.ones(3, 4), "dp2")))\n'
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.stdout == "True\n", done.stderr
