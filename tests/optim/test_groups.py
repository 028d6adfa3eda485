"""Which parameters share settings: LiBai's rules, RMSNorm among the norms, each parameter once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dufu.errors import ConfigError
from dufu.layers import LayerNorm, RMSNorm
from dufu.models.gpt2 import GPT2
from dufu.optim import AdamW, get_default_optimizer_params


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(3, 4))
        self.proj = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.rms, self.own_rms, self.own_norm = nn.RMSNorm(4), RMSNorm(4), LayerNorm(4)
        self.head = nn.Linear(4, 3)


def settings(groups: list[dict[str, Any]], model: nn.Module) -> dict[str, dict[str, Any]]:
    names = {p: n for n, p in model.named_parameters()}
    return {names[p]: {k: v for k, v in g.items() if k != "params"} for g in groups for p in g["params"]}


def test_norms_and_biases_have_their_own_decay() -> None:
    model = Net()
    found = settings(get_default_optimizer_params(model, 0.1, 0.01, weight_decay_norm=0.02, weight_decay_bias=0.03), model)
    decays = {name: value["weight_decay"] for name, value in found.items()}
    for name in ("norm.weight", "rms.weight", "own_rms.weight", "own_norm.weight"):
        assert decays[name] == 0.02, name
    for name in ("norm.bias", "own_norm.bias", "proj.bias", "head.bias"):
        assert decays[name] == 0.03, name
    assert decays["pos_embed"] == decays["proj.weight"] == 0.01
    assert all(value["lr"] == 0.1 for value in found.values())


def test_without_a_bias_rule_a_norms_bias_is_a_norms() -> None:
    model = Net()
    found = settings(get_default_optimizer_params(model, weight_decay=0.01, weight_decay_norm=0.0), model)
    assert found["norm.bias"]["weight_decay"] == 0.0 and found["proj.bias"]["weight_decay"] == 0.01


def test_one_group_for_each_setting_in_order_of_appearance() -> None:
    model = Net()
    groups = get_default_optimizer_params(model, weight_decay=0.01, weight_decay_norm=0.0, weight_decay_bias=0.0)
    assert [g["weight_decay"] for g in groups] == [0.01, 0.0]
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_overrides_by_leaf_and_by_pattern() -> None:
    model = Net()
    groups = get_default_optimizer_params(
        model,
        base_lr=0.1,
        weight_decay=0.01,
        overrides={"pos_embed": {"weight_decay": 0.0}},
        pattern_overrides={"head.*": {"lr": 1.0}, "*.bias": {"weight_decay": 0.5}},
    )
    found = settings(groups, model)
    assert found["pos_embed"]["weight_decay"] == 0.0
    assert (found["head.bias"]["lr"], found["head.bias"]["weight_decay"]) == (1.0, 0.5)
    assert found["head.weight"]["lr"] == 1.0 and found["proj.weight"]["lr"] == 0.1


def test_frozen_parameters_are_left_out() -> None:
    model = Net()
    model.proj.requires_grad_(False)
    assert not any(n.startswith("proj") for n in settings(get_default_optimizer_params(model), model))


def test_a_tied_matrix_is_trained_once() -> None:
    # B031: 100 rows of 16, head and embedding on one matrix
    sizes = dict(hidden_layers=1, hidden_size=16, ffn_hidden_size=32, num_attention_heads=2, max_seq_length=8)
    model = GPT2(vocab_size=100, **sizes)
    groups = get_default_optimizer_params(model)
    held = [p for g in groups for p in g["params"]]
    assert sum(p.shape == (100, 16) for p in held) == 1
    assert sum(p.numel() for p in held) == sum(p.numel() for p in model.parameters())
    optimizer = AdamW(groups)
    for p in held:
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = sum(s["exp_avg"].numel() for s in optimizer.state.values())
    assert state == sum(p.numel() for p in model.parameters())


def test_clip_norm_under_both_names() -> None:
    model = Net()
    for given, want in (({}, 1.0), ({"clip_grad_norm": 0.5}, 0.5), ({"clip_grad_max_norm": 0.5}, 0.5)):
        assert {g["clip_grad_max_norm"] for g in get_default_optimizer_params(model, **given)} == {want}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_decay_bias": 0.0, "overrides": {"bias": {"weight_decay": 0.1}}}, "set by weight_decay_bias and by overrides"),
        ({"clip_grad_norm": 1.0, "clip_grad_max_norm": 2.0}, "give one of them"),
        ({"overrides": {"pos_embd": {"lr": 0.1}}}, 'overrides: "pos_embd" meets no trained parameter; did you mean "pos_embed"?'),
        ({"pattern_overrides": {"haed.weight": {"lr": 0.1}}}, 'did you mean "head.weight"?'),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_default_optimizer_params(Net(), **arguments)
    assert message in str(caught.value)
