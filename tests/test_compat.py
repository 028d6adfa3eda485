"""Private PyTorch names: a release that moves one, or changes what it does, is noticed here."""

from __future__ import annotations

import torch
from torch import nn

from dufu.compat import (
    after_backward,
    backward_to_inputs,
    backward_to_weights,
    pipeline_computations,
    storage_identity,
    with_messages,
)


def test_storage_identity_tells_shared_memory_from_own() -> None:
    for device in ("cpu", "meta"):
        whole = torch.empty(4, device=device)
        assert storage_identity(whole) == storage_identity(whole[1:]) != storage_identity(torch.empty(4, device=device))


def test_a_schedule_computes_everything_once_and_sends_what_others_need() -> None:
    for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        v_shaped = name in ("ZBVZeroBubble", "DualPipeV")

        def owner(stage: int, v_shaped: bool = v_shaped) -> int:
            return min(stage, 3 - stage) if v_shaped else stage % 2

        order = pipeline_computations(name, 2, 2, 4)
        for rank, actions in order.items():
            assert len(set(actions)) == len(actions)
            assert {stage for _, stage, _ in actions} == {s for s in range(4) if owner(s) == rank}
        lowered = with_messages(order, owner, 4)
        sent = sorted((k[-1], s, m) for actions in lowered.values() for k, s, m in actions if k.startswith("SEND"))
        got = sorted(
            (k[-1], s - 1 if k[-1] == "F" else s + 1, m) for a in lowered.values() for k, s, m in a if k.startswith("RECV")
        )
        assert sent == got and len(sent) == 4 * 2 * (2 if v_shaped else 3)


def test_the_two_parts_of_a_backward_make_the_whole() -> None:
    torch.manual_seed(1)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x, memory = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def outputs() -> list[torch.Tensor]:  # the second stream is used and handed on
        return [second(first(x).tanh() * memory), memory]

    grads = [torch.randn(3, 4), torch.randn(3, 4)]
    weights = [*first.parameters(), *second.parameters()]
    torch.autograd.backward(outputs(), grads)
    whole = [t.grad.clone() for t in (x, memory, *weights) if t.grad is not None]
    for tensor in (x, memory, *weights):
        tensor.grad = None
    rest = backward_to_inputs(outputs(), grads, [x, memory], list(weights))
    assert all(w.grad is None for w in weights)
    backward_to_weights(list(weights), rest)
    parts = [t.grad for t in (x, memory, *weights) if t.grad is not None]
    assert len(parts) == len(whole) and all(torch.equal(a, b) for a, b in zip(parts, whole))


def test_a_function_is_called_when_backward_has_ended() -> None:
    weight, seen = nn.Parameter(torch.ones(3)), []
    weight.register_post_accumulate_grad_hook(lambda p: after_backward(lambda: seen.append(p.grad.sum().item())))
    other = nn.Parameter(torch.ones(1))
    (weight.sum() * other).sum().backward()
    assert seen == [3.0] and other.grad is not None
