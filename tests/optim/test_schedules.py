"""Every schedule's values, worked out by hand from its formula, and that the step is its whole state."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from dufu import optim
from dufu.errors import ConfigError

PI, ROOT = math.pi, math.sqrt
# name -> (class, arguments, {t: value}); the base rate is 0.1, max_iter 20; warm-up 4 from a tenth, unless said otherwise
CASES: dict[str, tuple[str, dict[str, Any], dict[int, float]]] = {
    # inner(4) = 0.1 (0.9 · ½(1 + cos(π/5)) + 0.1)
    "cosine": (
        "WarmupCosineLR",
        {"alpha": 0.1},
        {
            0: 0.01,
            2: 0.01 + (0.1 * (0.9 * 0.5 * (1 + math.cos(PI / 5)) + 0.1) - 0.01) * 0.5,
            4: 0.1 * (0.9 * 0.5 * (1 + math.cos(PI / 5)) + 0.1),
            10: 0.055,
            20: 0.01,
            30: 0.01,
        },
    ),
    "cosine, constant warm-up": ("WarmupCosineLR", {"warmup_method": "constant"}, {0: 0.01, 3: 0.01, 10: 0.05}),
    "cosine annealing": ("WarmupCosineAnnealingLR", {"eta_min": 0.02}, {0: 0.01, 10: 0.06, 20: 0.02}),
    "step": ("WarmupStepLR", {"step_size": 3, "gamma": 0.5}, {0: 0.01, 2: 0.01 + (0.05 - 0.01) / 2, 4: 0.05, 6: 0.025, 11: 0.0125}),
    "multi-step": ("WarmupMultiStepLR", {"milestones": [6, 12]}, {3: 0.0775, 4: 0.1, 5: 0.1, 6: 0.01, 11: 0.01, 12: 0.001}),
    "multi-step, shares": ("WarmupMultiStepLR", {"milestones": [0.3, 0.6]}, {4: 0.1, 5: 0.1, 6: 0.01, 11: 0.01, 12: 0.001}),
    "exponential": ("WarmupExponentialLR", {"gamma": 0.5}, {0: 0.01, 4: 0.1 / 16, 2: 0.01 + (0.1 / 16 - 0.01) / 2, 6: 0.1 / 64}),
    "polynomial of LiBai": ("WarmupPolynomialLR", {"end_learning_rate": 0.02, "power": 2.0}, {10: 0.08 * 0.25 + 0.02, 25: 0.02}),
    "polynomial of LiBai, its own end": ("WarmupPolynomialLR", {}, {10: (0.1 - 1e-4) * 0.5 + 1e-4, 20: 1e-4}),
    "polynomial of LiBai, cycling": (
        "WarmupPolynomialLR",
        {"end_learning_rate": 0.0, "cycle": True, "warmup_iter": 1},
        {0: 0.01, 1: 0.095, 20: 0.0, 21: 0.1 * (1 - 21 / 40), 40: 0.0},
    ),
    "constant": ("ConstantLR", {}, {0: 0.01, 2: 0.055, 4: 0.1, 19: 0.1}),
    "linear": ("LinearLR", {}, {0: 0.01, 4: 0.1, 12: 0.05, 19: 0.1 / 16, 20: 0.0, 21: 0.0}),
    "linear to a tenth": ("LinearLR", {"end_factor": 0.1}, {12: 0.055, 20: 0.01}),
    "polynomial": ("PolynomialLR", {"end_learning_rate": 0.02, "power": 2.0}, {4: 0.1, 12: 0.04, 20: 0.02}),
    "inverse square root": ("InverseSqrtLR", {}, {2: 0.055, 4: 0.1, 9: 0.1 * ROOT(4 / 9), 16: 0.05}),
    "inverse square root, own timescale": (
        "InverseSqrtLR",
        {"timescale": 12, "warmup_iter": 0},
        {0: 0.1, 12: 0.1 / ROOT(2), 36: 0.05},
    ),
    "wsd": ("WarmupStableDecayLR", {"decay_ratio": 0.25}, {2: 0.055, 4: 0.1, 15: 0.1, 16: 0.08, 19: 0.02, 20: 0.0}),
    "wsd, root": (
        "WarmupStableDecayLR",
        {"decay_iter": 4, "decay_shape": "sqrt", "end_factor": 0.1},
        {16: 0.1, 17: 0.055, 20: 0.01},
    ),
    "wsd, cosine": ("WarmupStableDecayLR", {"decay_iter": 4, "decay_shape": "cosine"}, {18: 0.05, 20: 0.0}),
    "one cycle": ("OneCycleLR", {}, {0: 0.1 / 25, 2: 0.004 + 0.096 / 2, 4: 0.1, 19: 0.1 / 25 / 1e4}),
}


def schedule_of(name: str, base: float = 0.1, **changes: Any) -> Any:
    kind, arguments, _ = CASES[name]
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], lr=base)
    common = {"max_iter": 20, "warmup_iter": 4, **({} if kind == "OneCycleLR" else {"warmup_factor": 0.1})}
    return getattr(optim, kind)(optimizer, **{**common, **arguments, **changes})


@pytest.mark.parametrize("name", CASES)
def test_values_are_the_formulas(name: str) -> None:
    schedule = schedule_of(name)
    for t, value in CASES[name][2].items():
        # the same formula written in another order: float64 rounding only
        assert schedule.rate(0.1, t) == pytest.approx(value, rel=1e-12, abs=1e-18), t


@pytest.mark.parametrize("name", CASES)
def test_resumed_at_any_step_the_table_is_the_same(name: str) -> None:
    whole = schedule_of(name)
    table = []
    for t in range(20):
        whole.set(t)
        table.append(whole.optimizer.param_groups[0]["lr"])
    for k in range(20):
        resumed = schedule_of(name)
        rates = []
        for t in range(k, 20):
            resumed.set(t)
            rates.append(resumed.optimizer.param_groups[0]["lr"])
        assert rates == table[k:]  # to the last bit


def test_one_cycle_is_pytorchs() -> None:
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(theirs, max_lr=0.1, total_steps=20, pct_start=0.4, cycle_momentum=False)
    ours = schedule_of("one cycle", warmup_iter=0, pct_start=0.4)
    for t in range(20):
        assert ours.rate(0.1, t) == pytest.approx(cycle.get_last_lr()[0], rel=1e-12)
        theirs.step()
        if t < 19:
            cycle.step()


def test_every_group_keeps_its_own_base() -> None:
    optimizer = optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": b} for b in (0.1, 0.4)])
    schedule = optim.ConstantLR(optimizer, 20, warmup_iter=4)
    schedule.set(2)
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.2]


def test_libais_schedules_say_that_there_is_no_warm_up() -> None:
    with pytest.warns(UserWarning, match="WarmupCosineLR: warmup_iter is 0"):
        schedule = schedule_of("cosine", warmup_iter=0)
    assert schedule.rate(0.1, 0) == 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert schedule_of("constant", warmup_iter=0).rate(0.1, 0) == 0.1


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("cosine", {"warmup_method": "linaer"}, 'warmup_method="linaer"; did you mean "linear"'),
        ("cosine", {"max_iter": 0}, "max_iter=0; at least 1"),
        ("step", {"step_size": 0}, "step_size=0; at least 1"),
        ("multi-step", {"milestones": [12, 6]}, "each later than the one before"),
        ("wsd", {"decay_iter": 17}, "4 updates of warm-up and 17 of decay do not fit into max_iter=20"),
        ("wsd", {"decay_shape": "cosin"}, 'did you mean "cosine"'),
        ("inverse square root", {"warmup_iter": 0}, "timescale=10000"),
        ("one cycle", {"pct_start": 0.3}, "give one of them"),
    ],
)
def test_what_cannot_be_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_of(name, **changes)
    assert message in str(caught.value)
