"""The decoding loop: prefill, then one token at a time, with or without a cache giving the same text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dufu.errors import ConfigError
from dufu.generation.sampling import draw, keep_top_k, keep_top_p, penalise_repetition, row_keys
from dufu.layers.attention import KeyValueCache
from dufu.models.chain import Batch, ChainModel


@dataclass(frozen=True)
class Decoding:
    """How text is decoded.

    Args:
        max_new_tokens: most tokens after the prompt; None = 64, or as many as the model's positions leave room for.
        min_new_tokens: no end token before this many.
        max_length: most tokens in all; None = the model's positions.
        temperature: scores are divided by it; 0 = greedy.
        top_k: sample among the k likeliest; 0 = all.
        top_p: sample among the likeliest that make up this probability.
        repetition_penalty: above 1 makes tokens that have occurred less likely.
        end_tokens: any of them ends a row; the end token itself is not part of the text.
        seed: of sampling.
        use_cache: keep keys and values of earlier tokens.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    max_length: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    end_tokens: tuple[int, ...] = field(default=())
    seed: int = 0
    use_cache: bool = True

    def __post_init__(self) -> None:
        checks = (
            ("max_new_tokens", self.max_new_tokens is None or self.max_new_tokens >= 1, "at least 1"),
            ("min_new_tokens", self.min_new_tokens >= 0, "at least 0"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0; 1 changes nothing"),
        )
        for name, fine, rule in checks:
            if not fine:
                raise ConfigError(f"{name}={getattr(self, name)}: {rule}")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}")


def room(decoding: Decoding, model: ChainModel, longest: int) -> int:
    """Return how many tokens may follow the longest prompt.

    Raises:
        ConfigError: the prompt, or the prompt with the tokens asked for, does not fit; the message names the numbers.
    """
    positions = getattr(model, "max_seq_length", None)
    limit = min(n for n in (positions, decoding.max_length, 1 << 30) if n is not None)
    if longest >= limit:
        raise ConfigError(f"the prompt has {longest} tokens, but at most {limit - 1} leave room for a new one")
    if decoding.max_new_tokens is None:
        return min(64, limit - longest)
    if longest + decoding.max_new_tokens > limit:
        raise ConfigError(
            f"a prompt of {longest} tokens and max_new_tokens={decoding.max_new_tokens} exceed the {limit} positions; "
            f"at most {limit - longest} new tokens fit"
        )
    return decoding.max_new_tokens


@torch.no_grad()
def decode(
    model: ChainModel,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    device: torch.device,
    on_token: Callable[[list[int]], None] | None = None,
    repeats: Sequence[int] | None = None,
) -> list[list[int]]:
    """Continue each prompt.

    Rows are padded on the left; padding has no position, is never attended to, and so changes no row's text.

    Args:
        model: in evaluation mode; its call gives the scores of the whole vocabulary.
        prompts: token numbers, at least one each.
        decoding: how.
        device: where the model lies.
        on_token: called with each step's tokens, -1 for ended rows.
        repeats: how often each prompt came before, so that equal prompts are sampled differently; None = never.

    Returns:
        The new tokens of each row, without the end token.
    """
    if any(not prompt for prompt in prompts):
        raise ConfigError("a prompt has no tokens; give at least one character")
    if not prompts:
        return []
    longest = max(map(len, prompts))
    count = room(decoding, model, longest)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    real = torch.zeros(len(prompts), longest, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt, device=device)
        real[row, longest - len(prompt) :] = True
    keys = row_keys(decoding.seed, prompts, repeats or [0] * len(prompts), device)
    caches = [KeyValueCache() for _ in range(len(model.units()) - 2)] if decoding.use_cache else None
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    ends = torch.tensor(decoding.end_tokens, dtype=torch.int64, device=device)
    rows: list[list[int]] = [[] for _ in prompts]
    for step in range(count):
        scores = _scores(model, tokens, real, caches, step)
        chosen = _choose(scores, tokens, real, decoding, keys, step, ends)
        ended |= torch.isin(chosen, ends)
        shown = torch.where(ended, -1, chosen).tolist()
        for row, token in enumerate(shown):
            if token >= 0:
                rows[row].append(token)
        if on_token:
            on_token(shown)
        if bool(ended.all()):
            break
        tokens = torch.cat((tokens, chosen.unsqueeze(1)), 1)
        real = torch.cat((real, torch.ones_like(real[:, :1])), 1)
    return rows


def _scores(model: ChainModel, tokens: Tensor, real: Tensor, caches: list[KeyValueCache] | None, step: int) -> Tensor:
    """Return the scores after the last token: (B, V) float32."""
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    new = 1 if caches is not None and step > 0 else tokens.shape[1]
    padding = None if bool(real.all()) else real
    batch = Batch(tokens[:, -new:], positions=positions[:, -new:], padding=padding, caches=caches, last_only=True)
    scores: Tensor = model(batch)
    return scores[:, -1].float()


def _choose(scores: Tensor, tokens: Tensor, real: Tensor, decoding: Decoding, keys: Tensor, step: int, ends: Tensor) -> Tensor:
    """Return the next token of each row."""
    scores = penalise_repetition(scores, tokens, real, decoding.repetition_penalty)
    if step < decoding.min_new_tokens and len(ends):
        scores = scores.index_fill(1, ends, float("-inf"))
    # Below the smallest temperature that float32 scores survive, sampling and greedy are the same.
    if decoding.temperature < 1e-6:
        return scores.argmax(-1)
    scores = keep_top_p(keep_top_k(scores / decoding.temperature, decoding.top_k), decoding.top_p)
    return draw(scores, keys, step)
