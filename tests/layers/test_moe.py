"""The mixture of experts against a plain loop over tokens and experts; capacity, padding, losses that add up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dufu.errors import ConfigError, NotBuiltError
from dufu.layers import MixtureOfExperts, Normal, Routing, TransformerLayer
from dufu.layers.random import normal_block

HIDDEN, FFN, EXPERTS = 8, 12, 5
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # fp32 sums of up to a hundred terms of about one, in another order


def mixture(**arguments: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(HIDDEN, FFN, EXPERTS, **arguments)
    with torch.no_grad():
        layer.router.weight.normal_(0.0, 0.7)  # so that choices differ
    return layer


def tokens(batch: int = 3, length: int = 7) -> Tensor:
    return torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(5))


def plain(layer: MixtureOfExperts, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return output and kept choices of a loop over every token, straight from the definition."""
    router, experts = layer.router, layer.experts
    out, kept = torch.zeros_like(x), torch.zeros(*x.shape[:2], router.top_k, dtype=torch.bool)
    for b in range(x.shape[0]):
        length = x.shape[1] if real is None else int(real[b].sum())
        factor = layer.capacity_factor
        room = math.inf if factor is None else math.ceil(round(factor * router.top_k * length / EXPERTS, 9))
        taken = [0] * EXPERTS
        for t in range(x.shape[1]):
            logits = router.weight @ x[b, t]
            scores = logits.sigmoid() if router.scoring == "sigmoid" else logits.softmax(0)
            best = sorted(range(EXPERTS), key=lambda e: (-float(scores[e].detach()), e))[: router.top_k]
            total = sum(scores[e] for e in best) if router.renormalize else 1.0
            for place, e in enumerate(best):
                if (real is not None and not real[b, t]) or taken[e] >= room:
                    continue
                taken[e] += 1
                kept[b, t, place] = True
                inner = experts.expand[e] @ x[b, t]
                if experts.gated:
                    inner = experts.activation(inner[:FFN]) * inner[FFN:]
                else:
                    inner = experts.activation(inner)
                out[b, t] = out[b, t] + router.scale * scores[e] / total * (inner @ experts.contract[e])
            if layer.shared is not None:
                out[b, t] = out[b, t] + layer.shared(x[b, t])
    return out, kept


VARIANTS: dict[str, dict[str, Any]] = {
    "two of five": {},
    "one, plain": {"top_k": 1, "gated": False, "activation": "gelu"},
    "all": {"top_k": 5, "renormalize": False},
    "sigmoid, scaled, shared": {"scoring": "sigmoid", "scale": 2.5, "shared_experts": 2, "top_k": 3},
    "capacity": {"capacity_factor": 0.8},
    "capacity one": {"capacity_factor": 1.0, "top_k": 1},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_output_and_gradients_are_those_of_a_plain_loop(name: str, padded: bool) -> None:
    layer, x = mixture(**VARIANTS[name]), tokens().requires_grad_()
    real = torch.arange(7) < torch.tensor([7, 4, 6])[:, None] if padded else None
    weights = torch.randn(3, 7, HIDDEN)
    results = []
    for run in (lambda: layer(x, Routing(real=real)), lambda: plain(layer, x, real)[0]):
        layer.zero_grad()
        x.grad = None
        out = run()
        (out * weights).sum().backward()
        results.append([out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())])
    for found, wanted in zip(*results):
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_capacity_drops_the_later_tokens_of_a_sample_and_no_other_sample_decides() -> None:
    layer, x = mixture(capacity_factor=0.6), tokens(4, 9)
    together = layer(x)
    for number in range(4):
        torch.testing.assert_close(layer(x[number : number + 1])[0], together[number], **CLOSE)
    kept = plain(layer, x)[1]
    assert not kept.all() and kept.any()
    dropped = ~kept.any(-1)
    assert dropped.any() and bool((together[dropped] == 0).all())  # the residual is all that such a token keeps
    padded = functional.pad(x, (0, 0, 0, 4), value=3.0)
    real = (torch.arange(13) < 9).expand(4, 13)
    torch.testing.assert_close(layer(padded, Routing(real=real))[:, :9], together, **CLOSE)


def test_without_a_limit_in_routing_nothing_is_dropped() -> None:
    tight, free = mixture(capacity_factor=0.2), mixture()
    torch.testing.assert_close(tight(tokens(), Routing(limited=False)), free(tokens()))


def test_equal_scores_go_to_the_first_experts() -> None:
    layer = mixture()
    with torch.no_grad():
        layer.router.weight.zero_()
    chosen, weights = layer.router.choose(layer.router(tokens()))
    assert bool((chosen == torch.tensor([0, 1])).all()) and bool((weights == 0.5).all())


def losses(layer: MixtureOfExperts, x: Tensor, scored: Tensor, real: Tensor | None = None) -> Tensor:
    routing = Routing(real=real, scored=scored)
    layer(x, routing)
    assert routing.losses is not None
    return routing.losses


def test_losses_are_those_of_their_definitions() -> None:
    layer, x = mixture(balance_weight=1.0, z_weight=1.0, top_k=2), tokens()
    real = torch.arange(7) < torch.tensor([7, 4, 6])[:, None]
    scored = real & (torch.arange(7) > 1)
    balance = z = 0.0
    for b, length in enumerate((7, 4, 6)):
        logits = x[b, :length] @ layer.router.weight.t()
        probs = logits.softmax(-1)
        chosen = probs.topk(2, -1).indices
        share = torch.tensor([(chosen == e).sum() / (2 * length) for e in range(EXPERTS)])
        balance += EXPERTS * (share * probs.mean(0)).sum() * scored[b].sum()
        z += logits.logsumexp(-1).square().mean() * scored[b].sum()
    torch.testing.assert_close(losses(layer, x, scored, real), torch.stack((balance, z)), **CLOSE)


def test_even_use_costs_one_a_token() -> None:
    layer, scored = mixture(balance_weight=1.0, top_k=5), torch.ones(3, 7, dtype=torch.bool)
    assert float(losses(layer, tokens(), scored)[0].detach()) == pytest.approx(21.0, rel=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_losses_and_their_gradients_add_up_over_any_cut_of_the_batch_and_padding_changes_nothing(scoring: str) -> None:
    layer, x = mixture(balance_weight=0.3, z_weight=0.2, scoring=scoring), tokens(4, 6)
    scored = torch.rand(4, 6, generator=torch.Generator().manual_seed(2)) < 0.7

    def gradient(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        layer.zero_grad()
        total = torch.stack([part.sum() for part in parts]).sum()
        total.backward()
        assert layer.router.weight.grad is not None
        return total.detach(), layer.router.weight.grad.clone()

    whole = gradient([losses(layer, x, scored)])
    cut = gradient([losses(layer, x[i : i + 1], scored[i : i + 1]) for i in (2, 0, 3, 1)])
    padded_x = functional.pad(x, (0, 0, 3, 0), value=9.0)
    real = (torch.arange(9) >= 3).expand(4, 9)
    padded = gradient([losses(layer, padded_x, functional.pad(scored, (3, 0)), real)])
    for other in (cut, padded):
        for found, wanted in zip(other, whole):
            torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_blank_batch_adds_exactly_zero() -> None:
    layer = mixture(balance_weight=1.0, z_weight=1.0)
    found = losses(layer, tokens().requires_grad_(), torch.zeros(3, 7, dtype=torch.bool))
    assert found.tolist() == [0.0, 0.0]
    found.sum().backward()
    assert layer.router.weight.grad is not None and not layer.router.weight.grad.any()


def test_autocast_chooses_as_float32_does() -> None:
    layer, x = mixture(), tokens(8, 32)
    wanted = layer.router.choose(layer.router(x))[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.router.choose(layer.router(x))[0], wanted)
        out = layer(x)
    torch.testing.assert_close(out.float(), layer(x), rtol=0.05, atol=0.05)  # bf16 products


def test_a_transformer_layer_takes_a_mixture() -> None:
    layer = TransformerLayer(HIDDEN, FFN, 2, mlp=mixture(balance_weight=1.0))
    routing = Routing(scored=torch.ones(3, 7, dtype=torch.bool))
    out = layer(tokens(), routing=routing)
    assert out.shape == (3, 7, HIDDEN) and routing.losses is not None and float(routing.losses[0].detach()) > 0
    torch.testing.assert_close(layer(tokens()), out)


@pytest.mark.parametrize("chunk", [7, 40, 1 << 20])
def test_stacked_weights_begin_the_same_however_many_numbers_are_made_at_a_time(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = normal_block(3, "experts.expand", 0, EXPERTS, 0, FFN * HIDDEN) * 0.5
    monkeypatch.setattr("dufu.layers.initial._CHUNK", chunk)
    part = torch.empty(2, 17)
    Normal(0.5).fill(part, 3, "experts.expand", 1, 5)
    assert torch.equal(part, whole[1:3, 5:22])


def test_a_mixture_costs_what_one_token_computes_with() -> None:
    assert mixture(top_k=2).cost == EXPERTS * HIDDEN + 2 * 3 * HIDDEN * FFN


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"top_k": 6}, ConfigError, "moe_top_k=6: from 1 to num_experts=5"),
    ({"top_k": 1, "renormalize": True}, ConfigError, "the router never learns"),
    ({"scoring": "softmin"}, ConfigError, 'moe_scoring="softmin"'),
    ({"capacity_factor": 0.0}, ConfigError, "moe_capacity_factor=0.0: above 0"),
    ({"balance": "global"}, NotBuiltError, 'use moe_balance="sample"'),
    ({"balance": "locl"}, ConfigError, 'moe_balance="locl"'),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), MISTAKES)
def test_mistakes_are_errors(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        mixture(**arguments)
