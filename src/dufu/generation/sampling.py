"""From scores to the next token: penalties, filters, and a draw that depends on nothing but the seed and the prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dufu.layers.random import derive, stable_hash, words


def row_keys(seed: int, prompts: Sequence[Sequence[int]], repeats: Sequence[int], device: torch.device) -> Tensor:
    """Return each row's random stream: a function of the seed, the prompt, and how often the same prompt came before it.

    So a row's text is the same alone, in any batch and on any process.

    Returns:
        (B,) int64.
    """
    keys = [stable_hash("sample", seed, *prompt, "repeat", repeat) for prompt, repeat in zip(prompts, repeats)]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def penalise_repetition(scores: Tensor, tokens: Tensor, real: Tensor, penalty: float) -> Tensor:
    """Make tokens that have occurred less likely (Keskar et al., 2019): positive scores divided, negative ones multiplied.

    Args:
        scores: (B, V).
        tokens: (B, S) prompt and text so far.
        real: (B, S) bool, false for padding.
        penalty: 1 changes nothing.
    """
    if penalty == 1.0:
        return scores
    occurred = torch.zeros_like(scores, dtype=torch.int32).scatter_add_(1, tokens, real.int()) > 0
    return torch.where(occurred, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the k largest scores of each row; 0 keeps all."""
    if k <= 0 or k >= scores.shape[-1]:
        return scores
    least = scores.topk(k, -1).values[..., -1:]
    return scores.masked_fill(scores < least, float("-inf"))


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the smallest set of tokens whose probability reaches p (Holtzman et al., 2020); at least one."""
    if p >= 1.0:
        return scores
    ordered, places = scores.sort(-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    dropped = torch.zeros_like(before, dtype=torch.bool).scatter_(-1, places, before >= p)
    return scores.masked_fill(dropped, float("-inf"))


def draw(scores: Tensor, keys: Tensor, step: int) -> Tensor:
    """Draw one token a row from softmax(scores) by the Gumbel maximum: argmax(scores - log(-log u)).

    Args:
        scores: (B, V), already divided by the temperature and filtered.
        keys: (B,) from `row_keys`.
        step: number of the new token.
    """
    bits = words(derive(keys, stable_hash("token", step)), 0, scores.shape[-1])
    uniform = ((bits >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)
    return (scores.double() - (-uniform.log()).log()).argmax(-1)
