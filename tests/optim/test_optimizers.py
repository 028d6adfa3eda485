"""Each optimizer against PyTorch's own where there is one, otherwise against the paper's formulas written out plainly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dufu import optim
from dufu.config.registry import lookup
from dufu.errors import ConfigError, DufuError

SHAPES = [(6, 4), (5,), (3, 2, 2), ()]


def weights_and_grads(steps: int = 5) -> tuple[list[Tensor], list[list[Tensor]]]:
    torch.manual_seed(0)
    return [torch.randn(s) for s in SHAPES], [[torch.randn(s) for s in SHAPES] for _ in range(steps)]


def trained(make: Any, scale: float | None = None, **arguments: Any) -> list[Tensor]:
    """Return the weights after five updates; with a scale, of gradients that are larger by it and divided inside the optimizer."""
    weights, grads = weights_and_grads()
    params = [nn.Parameter(w.clone()) for w in weights]
    optimizer = make(params, **arguments)
    if scale is not None:
        optimizer.grad_scale = torch.tensor(scale)
    for step in grads:
        for p, g in zip(params, step):
            p.grad = g * (scale or 1.0)
        optimizer.step()
    return [p.detach() for p in params]


def close(found: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-6) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)  # float32 rounding of a few operations


ADAM = dict(lr=0.05, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1)


@pytest.mark.parametrize(
    ("ours", "theirs", "arguments"),
    [
        (optim.AdamW, torch.optim.AdamW, ADAM),
        (optim.Adam, torch.optim.Adam, ADAM),
        (optim.SGD, torch.optim.SGD, dict(lr=0.05, weight_decay=0.1)),
        (optim.SGD, torch.optim.SGD, dict(lr=0.05, weight_decay=0.1, momentum=0.9)),
        (optim.SGD, torch.optim.SGD, dict(lr=0.05, weight_decay=0.1, momentum=0.9, nesterov=True)),
    ],
)
@pytest.mark.parametrize("scale", [None, 64.0])
def test_equals_pytorchs_own(ours: Any, theirs: Any, arguments: dict[str, Any], scale: float | None) -> None:
    close(trained(ours, scale, **arguments), trained(theirs, foreach=False, **arguments))


def test_uncorrected_adamw_is_berts() -> None:
    weights, grads = weights_and_grads()
    for i, w in enumerate(weights):
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for step in grads:
            m = 0.8 * m + 0.2 * step[i]
            v = 0.95 * v + 0.05 * step[i] ** 2
            w -= 0.05 * (m / (v.sqrt() + 1e-4) + 0.1 * w)
    close(trained(optim.AdamW, do_bias_correction=False, **ADAM), weights)


def test_first_uncorrected_update_is_larger_by_the_known_factor() -> None:
    # (1 - beta1) / sqrt(1 - beta2) = 0.1 / sqrt(0.001) = 3.162 times the corrected one, for betas 0.9 and 0.999
    moved = []
    for correct in (False, True):
        p = nn.Parameter(torch.ones(1))
        optimizer = optim.AdamW([p], lr=1e-3, weight_decay=0.0, do_bias_correction=correct)
        p.grad = torch.full((1,), 0.5)
        optimizer.step()
        moved.append(1.0 - p.item())
    assert moved[0] / moved[1] == pytest.approx(0.1 / 0.001**0.5, rel=1e-3)  # 1 - p has four good digits in float32


def test_uncorrected_adamw_counts_its_steps_all_the_same() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([p], do_bias_correction=False)
    for _ in range(4):
        p.grad = torch.ones(3)
        optimizer.step()
    assert optimizer.state[p]["step"].item() == 4.0


@pytest.mark.parametrize("scale", [None, 64.0])
@pytest.mark.parametrize("correct", [True, False])
def test_lamb_is_the_papers(correct: bool, scale: float | None) -> None:
    weights, grads = weights_and_grads()
    for i, w in enumerate(weights):
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for t, step in enumerate(grads, 1):
            m = 0.8 * m + 0.2 * step[i]
            v = 0.95 * v + 0.05 * step[i] ** 2
            m_hat, v_hat = (m / (1 - 0.8**t), v / (1 - 0.95**t)) if correct else (m, v)
            u = m_hat / (v_hat.sqrt() + 1e-4) + 0.1 * w
            w -= 0.05 * w.norm() / u.norm() * u
    close(trained(optim.LAMB, scale, do_bias_correction=correct, **ADAM), weights)


def test_lamb_moves_a_parameter_of_zeros() -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer = optim.LAMB([p], lr=0.1, weight_decay=0.0)
    p.grad = torch.tensor([1.0, -1.0, 0.0])
    optimizer.step()
    # the ratio is 1, and Adam's first direction is the gradient's sign
    torch.testing.assert_close(p.detach(), torch.tensor([-0.1, 0.1, 0.0]), rtol=1e-5, atol=1e-6)


def plain_adafactor(
    w: Tensor, grads: list[Tensor], lr: float, wd: float, scale: bool, relative: bool, beta1: float | None
) -> Tensor:
    """Shazeer and Stern's algorithm 4 (for a matrix) and 5 (for a vector), in double precision."""
    w, shape = w.double(), w.shape
    matrix = w.dim() > 1
    r: Any = 0.0
    c: Any = 0.0
    m = torch.zeros_like(w)
    for t, g in enumerate(grads, 1):
        g = g.double()
        square = (g**2 + 1e-30).reshape(shape[0], -1) if matrix else g**2 + 1e-30
        beta2 = 1 - t**-0.8
        if matrix:
            r = beta2 * r + (1 - beta2) * square.sum(1)
            c = beta2 * c + (1 - beta2) * square.sum(0)
            v = (torch.outer(r, c) / r.sum()).reshape(shape)
        else:
            r = beta2 * r + (1 - beta2) * square
            v = r
        u = g / v.sqrt()
        u = u / max(1.0, u.square().mean().sqrt().item())
        rate = min(lr, t**-0.5) if relative else lr
        if scale:
            rate *= max(1e-3, w.square().mean().sqrt().item())
        u = rate * u
        if beta1 is not None:
            m = beta1 * m + (1 - beta1) * u
            u = m
        w = w - lr * wd * w - u
    return w.float()


@pytest.mark.parametrize(
    ("scale", "relative", "beta1", "lr"),
    [(True, True, None, 0.6), (False, False, None, 0.05), (True, False, 0.9, 0.05), (False, True, 0.5, 2.0)],
)
def test_adafactor_is_the_papers(scale: bool, relative: bool, beta1: float | None, lr: float) -> None:
    weights, grads = weights_and_grads()
    wanted = [plain_adafactor(w, [g[i] for g in grads], lr, 0.1, scale, relative, beta1) for i, w in enumerate(weights)]
    found = trained(optim.Adafactor, lr=lr, weight_decay=0.1, scale_parameter=scale, relative_step=relative, beta1=beta1)
    close(found, wanted, 1e-5)


def test_adafactor_is_pytorchs_on_matrices() -> None:
    torch.manual_seed(1)
    start, grads = torch.randn(6, 4), torch.randn(5, 6, 4)
    found = []
    for optimizer_of in (
        lambda p: optim.Adafactor([p], lr=0.3, weight_decay=0.1),
        lambda p: torch.optim.Adafactor([p], lr=0.3, weight_decay=0.1, eps=(1e-30, 1e-3)),
    ):
        p = nn.Parameter(start.clone())
        optimizer = optimizer_of(p)
        for g in grads:
            p.grad = g.clone()
            optimizer.step()
        found.append(p.detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_adafactors_state_is_one_number_a_row_and_a_column() -> None:
    p = nn.Parameter(torch.randn(100, 60))
    optimizer = optim.Adafactor([p])
    p.grad = torch.randn(100, 60)
    optimizer.step()
    sizes = {kind: sum(t.numel() for t in named.values()) for kind, named in optimizer.named_state().items()}
    assert sorted(sizes.values()) == [60, 100]
    assert all(t.dim() == 0 for t in optimizer.state[p].values())


@pytest.mark.parametrize("kind", [optim.LAMB, optim.Adafactor])
def test_parameters_cut_over_two_places_move_as_whole_ones(kind: Any) -> None:
    """Two stand-in processes hold stretches of a flat buffer of two matrices, the second cut in the middle of a row."""
    torch.manual_seed(2)
    a, b, ga, gb = torch.randn(3, 4), torch.randn(5, 2), torch.randn(4, 3, 4), torch.randn(4, 5, 2)
    whole = [nn.Parameter(a.clone()), nn.Parameter(b.clone())]
    reference = kind(whole, lr=0.1)
    # elements 0-14 (a, and b's first row and a half), 15-21 and two of padding
    flat = [
        nn.Parameter(torch.cat([a.view(-1), b.view(-1)[:3]])),
        nn.Parameter(torch.cat([b.view(-1)[3:], torch.zeros(2)])),
    ]
    shapes = {"a": (3, 4), "b": (5, 2)}
    parts = [
        {flat[0]: [optim.Part("a", 0, ((0, 3, 0, 4),)), optim.Part("b", 12, ((0, 1, 0, 2), (1, 1, 0, 1)))]},
        {flat[1]: [optim.Part("b", 0, ((1, 1, 1, 1), (2, 3, 0, 2)))]},
    ]
    for step in range(4):
        whole[0].grad, whole[1].grad = ga[step], gb[step]
        reference.step()
    import threading

    barrier, board = threading.Barrier(2), {}
    outcome: list[str] = []

    def process(rank: int) -> None:
        def sum_(packed: Tensor) -> None:
            board[rank] = packed.clone()
            barrier.wait(20)
            packed.copy_(board[0] + board[1])
            barrier.wait(20)

        optimizer = kind([flat[rank]], lr=0.1)
        optimizer.bind(parts[rank], shapes, sum_)
        for step in range(4):
            grads = torch.cat([ga[step].reshape(-1), gb[step].reshape(-1), torch.zeros(2)])
            flat[rank].grad = grads[:15] if rank == 0 else grads[15:]
            optimizer.step()
        outcome.append("done")

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcome == ["done", "done"]
    got = torch.cat([flat[0].detach(), flat[1].detach()])
    close([got[:12], got[12:22], got[22:]], [whole[0].detach().view(-1), whole[1].detach().view(-1), torch.zeros(2)])


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adam, optim.LAMB, optim.SGD, optim.Adafactor])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_of_half_weights_is_float32(kind: Any, dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.ones(4, 3, dtype=dtype))
    more = {"momentum": 0.9} if kind is optim.SGD else {"beta1": 0.9} if kind is optim.Adafactor else {}
    optimizer = kind([p], lr=0.1, **more)
    for _ in range(2):
        p.grad = torch.full_like(p, 0.5)
        optimizer.step()
    assert p.dtype == dtype and float(p[0, 0].detach()) < 1.0
    held = [t for t in optimizer.state[p].values() if t.dim()]
    assert held and all(t.dtype == torch.float32 for t in held)


def test_a_master_copy_moves_where_pure_half_stands_still() -> None:
    # B059: Adam moves by the rate each step, here 6e-4, less than half a step of bf16 below 1 (2^-9 = 0.00195)
    master = nn.Parameter(torch.ones(1))
    pure = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = optim.AdamW([master, pure], lr=6e-4, weight_decay=0.0)
    for _ in range(100):
        for p in (master, pure):
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
    assert master.bfloat16().item() == pytest.approx(0.94, abs=0.002)
    assert pure.item() == 1.0


def test_short_names_find_the_classes() -> None:
    assert [lookup(n, "optimizer").__name__ for n in ("adamw", "adam", "sgd", "lamb", "adafactor")] == [
        "AdamW", "Adam", "SGD", "LAMB", "Adafactor",
    ]  # fmt: skip


def test_what_cannot_be_is_refused() -> None:
    p = nn.Parameter(torch.ones(1))
    for call, message in (
        (lambda: optim.AdamW([p], betas=(0.9, 1.0)), "each in [0, 1)"),
        (lambda: optim.SGD([p], nesterov=True), "needs momentum"),
        (lambda: optim.Adafactor([p], decay_rate=0.8), "below 0"),
        (lambda: optim.Adafactor([p], clip_threshold=0.0), "above 0"),
    ):
        with pytest.raises(ConfigError, match=message.replace("[", r"\[").replace(")", r"\)")):
            call()
    optimizer = optim.LAMB([p])
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(DufuError, match="added after the first step"):
        optimizer.step()
