"""Losses that return the sum over scored tokens; the caller divides by the count over the global batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dufu.config.registry import register_criterion
from dufu.errors import ConfigError
from dufu.layers.split import WHOLE, Split

IGNORE = -100  # the label of a token that is not scored


class _DividedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits whose vocabulary is divided: only maxima, sums and the target's logit cross processes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scored: Tensor, split: Split, smoothing: float, vocab: int) -> Tensor:
        rows = logits.shape[-1]
        first = split.rank * rows
        x = logits.float()
        real = max(0, min(rows, vocab - first))
        if real < rows:
            x = x.masked_fill(torch.arange(rows, device=x.device) >= real, float("-inf"))
        top = split.max_(x.max(-1).values)
        exps = (x - top.unsqueeze(-1)).exp_()
        total = split.sum_(exps.sum(-1))
        local = targets - first
        inside = (local >= 0) & (local < rows)
        # A label that is no word at all stays an error, as on one process.
        index = local.masked_fill(~inside, 0).masked_fill((targets < 0) | (targets >= vocab), rows).unsqueeze(-1)
        picked = split.sum_(x.gather(-1, index).squeeze(-1).masked_fill(~inside, 0.0))
        log_total = total.log() + top
        loss = log_total - picked
        if smoothing > 0:
            mean = split.sum_(x[..., :real].sum(-1)) / vocab
            loss = (1 - smoothing) * loss + smoothing * (log_total - mean)
        ctx.save_for_backward(exps, total, index, inside, scored)
        ctx.smoothing, ctx.vocab, ctx.real, ctx.dtype = smoothing, vocab, real, logits.dtype
        return loss.masked_fill(~scored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exps, total, index, inside, scored = ctx.saved_tensors
        out = exps / total.unsqueeze(-1)
        out.scatter_add_(-1, index, -(1 - ctx.smoothing) * inside.to(out.dtype).unsqueeze(-1))
        if ctx.smoothing > 0:
            out[..., : ctx.real] -= ctx.smoothing / ctx.vocab
        return (out * (grad * scored).unsqueeze(-1)).to(ctx.dtype), None, None, None, None, None


def cross_entropy_sum(
    logits: Tensor,
    labels: Tensor,
    *,
    split: Split = WHOLE,
    vocab_size: int | None = None,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the sum of token cross-entropies over the tokens that are scored.

    Args:
        logits: (N, V) scores, or this process's slice of V when `split` is divided.
        labels: (N,) true numbers; `ignore_index` where nothing is scored.
        split: how V is divided.
        vocab_size: V without padding; needed when divided.
        label_smoothing: share of the target's probability spread evenly over V (Szegedy et al., 2016).

    Returns:
        A float32 scalar; zero, with zero gradients, when nothing is scored.
    """
    if split.size == 1:
        return functional.cross_entropy(
            logits.float(), labels, reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing
        )
    if vocab_size is None:
        raise ConfigError("cross_entropy_sum: a divided vocabulary needs vocab_size")
    scored = labels != ignore_index
    targets = labels.masked_fill(~scored, 0)
    losses: Tensor = _DividedCrossEntropy.apply(logits, targets, scored, split, label_smoothing, vocab_size)
    return losses.sum()


def divided_argmax(logits: Tensor, split: Split, vocab_size: int) -> Tensor:
    """Return the argmax over a divided vocabulary: (N, V part) → (N,); of equal scores the smallest number wins."""
    rows = logits.shape[-1]
    first = split.rank * rows
    real = min(rows, vocab_size - first)
    if real <= 0:
        best = torch.full(logits.shape[:-1], float("-inf"), device=logits.device)
        where = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    else:
        best, where = logits[..., :real].float().max(-1)
    top = split.max_(best.clone())
    candidate = torch.where(best == top, -(where + first).double(), float("-inf"))
    return (-split.max_(candidate)).long()


@register_criterion("cross_entropy")
class CrossEntropyLoss(torch.nn.Module):
    """Cross-entropy as a module: (logits (…, V), labels (…)) → the sum over scored tokens; see `cross_entropy_sum`.

    Args:
        ignore_index: the label of what is not scored.
        label_smoothing: share of the target's probability spread evenly over V, from 0 to 1.
        vocab_size: V without padding; needed where tensor-parallel processes divide it.
    """

    def __init__(self, ignore_index: int = IGNORE, label_smoothing: float = 0.0, vocab_size: int | None = None) -> None:
        super().__init__()
        if not 0.0 <= label_smoothing <= 1.0:
            raise ConfigError(f"label_smoothing={label_smoothing}: from 0 to 1")
        self.ignore_index, self.label_smoothing, self.vocab_size = ignore_index, label_smoothing, vocab_size
        self.split: Split = WHOLE

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss."""
        return cross_entropy_sum(
            logits.flatten(0, -2),
            labels.flatten(),
            split=self.split,
            vocab_size=self.vocab_size,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )


ParallelCrossEntropyLoss = CrossEntropyLoss


@register_criterion("kl")
class KLDivergenceLoss(torch.nn.Module):
    """Distillation: Σ over scored tokens of KL(teacher ‖ student) at a temperature, times temperature² (Hinton et al., 2015).

    Args:
        temperature: both distributions are softened by it; above 0.

    Both logits cover the whole vocabulary.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if temperature <= 0.0:
            raise ConfigError(f"temperature={temperature}: above 0")
        self.temperature = temperature

    def forward(self, student: Tensor, teacher: Tensor, scored: Tensor | None = None) -> Tensor:
        """student, teacher (…, V) logits, scored (…) bool → the summed divergence."""
        log_q = functional.log_softmax(student.float() / self.temperature, -1)
        log_p = functional.log_softmax(teacher.float() / self.temperature, -1)
        each = functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
        if scored is not None:
            each = each.masked_fill(~scored, 0.0)
        return each.sum() * self.temperature**2
