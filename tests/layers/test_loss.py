"""Losses against PyTorch's, and what they must do where nothing is scored."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from dufu.errors import ConfigError
from dufu.layers import CrossEntropyLoss, KLDivergenceLoss
from dufu.layers.loss import cross_entropy_sum, divided_argmax
from dufu.layers.split import WHOLE


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_the_sum_over_scored_tokens(smoothing: float) -> None:
    logits, labels = torch.randn(4, 6, 11), torch.randint(0, 11, (4, 6))
    labels[0, :3] = -100
    scored = labels != -100
    log_p = torch.log_softmax(logits[scored].double(), -1)
    right = -log_p.gather(-1, labels[scored, None]).sum()
    wanted = (1 - smoothing) * right - smoothing * log_p.mean(-1).sum()
    assert float(CrossEntropyLoss(label_smoothing=smoothing)(logits, labels)) == pytest.approx(float(wanted), rel=1e-5)
    own = labels.masked_fill(~scored, 7)
    keep = own != 7
    mine = CrossEntropyLoss(ignore_index=7)(logits, own)
    assert float(mine) == pytest.approx(float(functional.cross_entropy(logits[keep], own[keep], reduction="sum")), rel=1e-5)


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_scored_gives_zero_and_zero_gradients(rows: int) -> None:
    logits = torch.randn(rows, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((rows,), -100))
    loss.backward()
    assert loss.item() == 0.0 and logits.grad is not None and not logits.grad.any()


def test_a_label_that_is_no_word_is_an_error() -> None:
    with pytest.raises(IndexError, match="7"):
        cross_entropy_sum(torch.randn(1, 5), torch.tensor([7]))


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits = torch.randn(4000, 50).bfloat16()
    labels = torch.randint(0, 50, (4000,))
    loss = cross_entropy_sum(logits, labels)
    wanted = functional.cross_entropy(logits.double(), labels, reduction="sum")
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx(float(wanted), rel=1e-5)


def test_of_equal_scores_the_smallest_number_wins() -> None:
    assert divided_argmax(torch.tensor([[1.0, 3.0, 3.0]]), WHOLE, 3).tolist() == [1]


def test_distillation_is_the_divergence_at_a_temperature() -> None:
    student, teacher = torch.randn(3, 7), torch.randn(3, 7)
    p, q = torch.softmax(teacher / 2, -1), torch.softmax(student / 2, -1)
    each = (p * (p / q).log()).sum(-1) * 4
    loss = KLDivergenceLoss(2.0)
    assert float(loss(student, teacher)) == pytest.approx(float(each.sum()), rel=1e-5)
    assert float(loss(student, teacher, torch.tensor([True, False, True]))) == pytest.approx(float(each[0] + each[2]), rel=1e-5)
    assert float(loss(teacher, teacher)) == pytest.approx(0.0, abs=1e-6)


def test_impossible_settings_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"label_smoothing=1\.5"):
        CrossEntropyLoss(label_smoothing=1.5)
    with pytest.raises(ConfigError, match="temperature=0"):
        KLDivergenceLoss(0)
