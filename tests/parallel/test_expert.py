"""Experts on several processes give what one process with all of them gives: outputs, gradients, routing losses; and each sends its share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dufu.errors import LayoutError
from dufu.layers import MixtureOfExperts, Routing
from dufu.layers.split import SplitRule
from dufu.parallel import faults
from dufu.parallel.collectives import Communicator, alone
from dufu.parallel.expert import expert_parameters, share_positions, split_experts
from dufu.parallel.layout import ParallelLayout
from dufu.parallel.process import join
from dufu.parallel.region import Block, Region, copy_overlap, split_region, whole_region
from dufu.parallel.sequence import SequenceSplit
from dufu.parallel.tensor import split_model
from dufu.parallel.view import places_of
from tests.pool import Ranks

HIDDEN, FFN, EXPERTS, LENGTH = 8, 12, 4, 8
SETTINGS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "capacity": {"capacity_factor": 0.7},
    "sigmoid, shared, one": {"scoring": "sigmoid", "shared_experts": 1, "top_k": 1, "gated": False, "capacity_factor": 1.0},
}
LAYOUTS = {
    "ep2": ParallelLayout(data=2, expert=2),
    "dp2": ParallelLayout(data=2),
    "dp4xep2": ParallelLayout(data=4, expert=2),
    "ep4": ParallelLayout(data=4, expert=4),
    "dp6xep2": ParallelLayout(data=6, expert=2),  # one process has a sample of padding only, and one has none
    "ep2xtp2": ParallelLayout(data=2, tensor=2, expert=2),
    "sp2": ParallelLayout(tensor=2, sequence=True),
    "ep2xsp2": ParallelLayout(data=2, tensor=2, expert=2, sequence=True),
    "cp2": ParallelLayout(context=2),
    "cp2xep2": ParallelLayout(context=2, expert=2),
    "cp2xtp2": ParallelLayout(context=2, tensor=2),
    "dp2xcp2xep4": ParallelLayout(data=2, context=2, expert=4),
}


def make(setting: str) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(HIDDEN, FFN, EXPERTS, balance_weight=0.5, z_weight=0.1, **SETTINGS[setting])
    with torch.no_grad():
        layer.router.weight.normal_(0.0, 0.7)
    return layer


def samples() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return five samples, the last one all padding: x, which tokens are real, which scored, and weights of the output."""
    chance = torch.Generator().manual_seed(3)
    x, weights = (torch.randn(5, LENGTH, HIDDEN, generator=chance) for _ in range(2))
    real = torch.arange(LENGTH) < torch.tensor([8, 8, 5, 8, 0])[:, None]
    return x, real, real & (torch.arange(LENGTH) != 2), weights * real.unsqueeze(-1)


def measure(setting: str, layout: ParallelLayout, fault: str | None = None) -> dict[str, Any]:
    """Run a layer over this process's samples; return what it gives and has sent."""
    processes = join(layout, torch.device("cpu"))
    layer = make(setting)
    values = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    experts = split_experts(layer, processes.expert)
    parts = {**experts, **split_model(layer, processes.tensor, experts)}
    share_positions(layer, processes.context)
    if layout.sequence:
        split = SequenceSplit(processes.tensor)
        split.active = True
        for module in layer.modules():
            if hasattr(module, "split"):
                module.split = split
    regions = {}
    for name, parameter in layer.named_parameters():
        whole = values[name]
        shape, regions[name] = parts.get(parameter, (tuple(whole.shape), whole_region(tuple(whole.shape))))
        assert shape == tuple(whole.shape)
        with torch.no_grad():
            copy_overlap(parameter.view(-1), regions[name], whole.reshape(-1), whole_region(shape))
    mine = torch.arange(processes.data.rank, 5, layout.data)
    places = places_of(processes.context.rank, layout.context, LENGTH) if layout.context > 1 else torch.arange(LENGTH)
    x, real, scored, weights = (t[mine][:, places] for t in samples())
    if layout.sequence:
        x, weights = (t.chunk(layout.tensor, 1)[processes.tensor.rank] for t in (x, weights))
    x.requires_grad_()
    routing = Routing(real=real, scored=scored, places=places if layout.context > 1 else None)
    with faults.inject(fault) if fault else nullcontext():
        out = layer(x, routing)
        assert routing.losses is not None
        ((out * weights).sum() + routing.losses.sum()).backward()
    stretch = processes.tensor.rank if layout.sequence else 0
    found: dict[str, Any] = {
        "mine": mine,
        "places": places.chunk(layout.tensor if layout.sequence else 1)[stretch],
        "out": out.detach(),
    }
    found |= {"x_grad": x.grad, "losses": processes.replicas.objects(routing.losses.detach())}
    divided = expert_parameters(layer)
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        assert grad is not None
        (processes.expert_replicas if parameter in divided else processes.replicas).sum_(grad)
        if layout.sequence and "router" in name:  # undivided: each process has a part of the gradient's sum
            processes.tensor.sum_(grad)
        found[name] = (grad.view(-1), regions[name])
    found["shapes"] = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    found["sent"] = {name: dict(getattr(processes, name).sent) for name in ("expert", "tensor", "context")}
    return found


def distance(setting: str, one: dict[str, Any], parts: list[dict[str, Any]]) -> float:
    """Return the largest difference between one process and several, of outputs, gradients and losses that are all of about one."""
    differences = []
    real = samples()[1]
    for part in parts:
        for what in ("out", "x_grad"):
            wanted = one[what][part["mine"]][:, part["places"]]
            kept = real[part["mine"]][:, part["places"]].unsqueeze(-1) if what == "out" else 1.0
            differences.append((part[what] - wanted) * kept)
        differences.append(torch.stack(part["losses"]).sum(0) - one["losses"][0])
    for name, parameter in make(setting).named_parameters():
        whole = one[name][0]
        joined = torch.full_like(whole, float("nan"))  # what no process holds stays so, and so does the largest difference
        everywhere = whole_region(tuple(parameter.shape))
        for part in parts:
            held, region = part[name]
            copy_overlap(joined, everywhere, held, region)
            wanted = torch.zeros_like(held)
            copy_overlap(wanted, region, whole, everywhere)
            differences.append(held - wanted)
        differences.append(joined - whole)
    return float(torch.cat([d.flatten() for d in differences]).abs().max())


CLOSE = 2e-5  # fp32 sums of up to a hundred terms of about one, in another order


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_divided_mixture_is_the_whole_one(name: str, setting: str, ranks: Ranks) -> None:
    layout = LAYOUTS[name]
    (one,) = ranks(1, measure, setting, ParallelLayout())
    parts = ranks(layout.world, measure, setting, layout)
    assert distance(setting, one, parts) < CLOSE
    for part in parts:
        experts, inner = EXPERTS // layout.expert, FFN // layout.tensor
        assert part["shapes"]["experts.contract"] == (experts, inner, HIDDEN)
        assert part["shapes"]["experts.expand"] == (experts, inner * (2 if SETTINGS[setting].get("gated", True) else 1), HIDDEN)
        if layout.tensor > 1:
            assert part["sent"]["tensor"]["all_gather" if layout.sequence else "all_reduce"] > 0
        if layout.context > 1:
            assert part["sent"]["context"]["all_reduce"] > 0


def test_what_is_sent_is_what_the_formula_says(ranks: Ranks) -> None:
    parts = ranks(2, measure, "dropless", LAYOUTS["ep2"])
    real = samples()[1]
    own = [2 * int(real[part["mine"]].sum()) for part in parts]  # rows of two experts for each real token
    sent = [part["sent"]["expert"]["all_to_all"] for part in parts]
    counts = 8 * EXPERTS
    row = HIDDEN * 4
    # What one process receives the other has sent or kept, so both together hand over each row twice forward and twice backward.
    assert sum(sent) == 2 * counts + 4 * sum(own) * row
    # Of one process: 2 (R + R') rows; R' differs from R, or nothing would show that rows travel unevenly.
    received = [(bytes_ - counts) // (2 * row) - rows for bytes_, rows in zip(sent, own)]
    assert sum(received) == sum(own) and received != own


FAULTS = [
    ("ep2", "expert.skip_gradient"),
    ("ep2", "expert.wrong_order"),
    ("cp2", "expert.own_usage"),
    ("ep2xtp2", "tensor.skip_enter"),
    ("ep2xtp2", "tensor.skip_leave"),
    ("sp2", "sequence.skip_scatter"),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_seeded_fault_shows(name: str, fault: str, ranks: Ranks) -> None:
    (one,) = ranks(1, measure, "dropless", ParallelLayout())
    assert distance("dropless", one, ranks(LAYOUTS[name].world, measure, "dropless", LAYOUTS[name], fault)) > 100 * CLOSE


def test_both_splits_together_are_rectangles_of_the_whole() -> None:
    whole = torch.arange(4 * 6 * 2.0).view(4, 6, 2)
    _, outer = split_region((4, 6, 2), SplitRule(0), 1, 2)
    for rule in (SplitRule(1), SplitRule(1, (4, 2))):
        shape, inner = split_region((2, 6, 2), rule, 1, 2)
        region = inner.within(outer.blocks[0])
        stretches = whole[2:].split(rule.sections or (6,), 1)
        wanted = torch.cat([s.chunk(2, 1)[1] for s in stretches], 1)
        found = torch.zeros(shape).view(-1)
        assert copy_overlap(found, region, whole.view(-1), whole_region((4, 6, 2))) == wanted.numel()
        assert torch.equal(found.view(shape), wanted)
    assert Region((Block(0, 1, 2, 3),)).within(Block(5, 4, 10, 20)) == Region((Block(5, 1, 12, 3),))


def test_experts_that_do_not_divide_are_refused() -> None:
    three = Communicator("expert", None, [0, 1, 2], 0)
    with torch.device("meta"):
        with pytest.raises(LayoutError, match=r"4 experts do not divide over train\.dist\.expert_parallel_size=3.*fits is 2"):
            split_experts(nn.ModuleDict({"moe": make("dropless")}), three)
        with pytest.raises(LayoutError, match="Linear has none"):
            split_experts(nn.Linear(2, 2), three)
    assert split_experts(make("dropless"), alone()) == {}
