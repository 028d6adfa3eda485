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
        max_new_tokens: most tokens after the prompt; None = 64, or as many as the model's positions leave that prompt.
        min_new_tokens: no end token before this many.
        max_length: most tokens in all, of an encoder-decoder model those of its decoder; None = the model's positions.
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


def room(decoding: Decoding, model: ChainModel, length: int) -> int:
    """Return how many tokens may follow a prompt of `length` tokens, whatever else is decoded beside it.

    Raises:
        ConfigError: the prompt, or the prompt with the tokens asked for, does not fit; the message names the numbers.
    """
    positions = getattr(model, "max_seq_length", None)
    limit = min(n for n in (positions, decoding.max_length, 1 << 30) if n is not None)
    if length >= limit:
        raise ConfigError(f"the prompt has {length} tokens, but at most {limit - 1} leave room for a new one")
    count = decoding.max_new_tokens or min(64, limit - length)
    if length + count > limit:
        raise ConfigError(
            f"a prompt of {length} tokens and max_new_tokens={decoding.max_new_tokens} exceed the {limit} positions; "
            f"at most {limit - length} new tokens fit"
        )
    if decoding.min_new_tokens > count:
        raise ConfigError(f"min_new_tokens={decoding.min_new_tokens}, but after a prompt of {length} tokens come at most {count}")
    return count


@dataclass
class Rows:
    """The rows that have not ended, padded on the left to a common width."""

    number: Tensor  # (B,) place in the caller's list
    tokens: Tensor  # (B, S)
    real: Tensor  # (B, S) bool, false for padding
    keys: Tensor  # (B,) random streams
    limits: Tensor  # (B,) most new tokens
    caches: list[KeyValueCache] | None

    def append(self, chosen: Tensor) -> None:
        """Add a token to each row."""
        self.tokens = torch.cat((self.tokens, chosen.unsqueeze(1)), 1)
        self.real = torch.cat((self.real, torch.ones_like(self.real[:, :1])), 1)

    def keep(self, rows: Tensor) -> None:
        """Drop the other rows, and the columns that then only pad."""
        if bool(rows.all()) or not bool(rows.any()):
            return
        first = int(self.real[rows].any(0).int().argmax())
        self.number, self.keys, self.limits = self.number[rows], self.keys[rows], self.limits[rows]
        self.tokens, self.real = self.tokens[rows, first:], self.real[rows, first:]
        keep_rows(self.caches, rows, first)


def keep_rows(caches: list[KeyValueCache] | None, rows: Tensor, first: int = 0) -> None:
    """Drop the other rows of caches, and the places before `first`."""
    for cache in caches or ():
        if cache.keys is not None and cache.values is not None:
            cache.keys, cache.values = cache.keys[rows, :, first:], cache.values[rows, :, first:]


@torch.no_grad()
def decode(
    model: ChainModel,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    device: torch.device,
    on_token: Callable[[list[int]], None] | None = None,
    repeats: Sequence[int] | None = None,
    vocabulary: int | None = None,
    forward: Callable[[Batch], Tensor] | None = None,
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
        vocabulary: only the first so many tokens may be chosen; None = all that the model scores.
        forward: gives the scores, where the model's own call cannot (a pipeline); None = the model.

    Returns:
        The new tokens of each row, without the end token.
    """
    if any(not prompt for prompt in prompts):
        raise ConfigError("a prompt has no tokens; give at least one character")
    if not prompts:
        return []
    rows = _start(model, prompts, decoding, device, repeats or [0] * len(prompts))
    return grow(rows, lambda step: _scores(forward or model, rows, step), decoding, on_token, vocabulary)


def grow(
    rows: Rows,
    scores_of: Callable[[int], Tensor],
    decoding: Decoding,
    on_token: Callable[[list[int]], None] | None,
    vocabulary: int | None,
) -> list[list[int]]:
    """Add a token at a time to rows until all have ended; return the new tokens of each, without the end token.

    Args:
        rows: at their beginning.
        scores_of: gives the scores (B, V) after the last tokens of the rows that are left, for a step.
        decoding, on_token, vocabulary: see decode.
    """
    count = len(rows.number)
    ends = torch.tensor(decoding.end_tokens, dtype=torch.int64, device=rows.tokens.device)
    found: list[list[int]] = [[] for _ in range(count)]
    for step in range(int(rows.limits.max())):
        scores = scores_of(step)
        if vocabulary is not None:
            scores[:, vocabulary:] = float("-inf")
        chosen = _choose(scores, rows, decoding, step, ends)
        ended = torch.isin(chosen, ends)
        shown = [-1] * count
        for number, token, over in zip(rows.number.tolist(), chosen.tolist(), ended.tolist()):
            if not over:
                found[number].append(token)
                shown[number] = token
        if on_token:
            on_token(shown)
        going = ~ended & (rows.limits > step + 1)
        if not bool(going.any()):
            break
        rows.append(chosen)
        rows.keep(going)
    return found


def _start(
    model: ChainModel, prompts: Sequence[Sequence[int]], decoding: Decoding, device: torch.device, repeats: Sequence[int]
) -> Rows:
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    real = torch.zeros(len(prompts), longest, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt, device=device)
        real[row, longest - len(prompt) :] = True
    return Rows(
        number=torch.arange(len(prompts), device=device),
        tokens=tokens,
        real=real,
        keys=row_keys(decoding.seed, prompts, repeats, device),
        limits=torch.tensor([room(decoding, model, len(prompt)) for prompt in prompts], device=device),
        caches=model.new_caches() if decoding.use_cache else None,
    )


def _scores(forward: Callable[[Batch], Tensor], rows: Rows, step: int) -> Tensor:
    """Return the scores after the last token: (B, V) float32."""
    positions = (rows.real.long().cumsum(1) - 1).clamp(min=0)
    new = 1 if rows.caches is not None and step > 0 else rows.tokens.shape[1]
    padding = None if bool(rows.real.all()) else rows.real
    batch = Batch(rows.tokens[:, -new:], positions=positions[:, -new:], padding=padding, caches=rows.caches, last_only=True)
    scores: Tensor = forward(batch)
    return scores[:, -1].float()


def _choose(scores: Tensor, rows: Rows, decoding: Decoding, step: int, ends: Tensor) -> Tensor:
    """Return the next token of each row."""
    scores = penalise_repetition(scores, rows.tokens, rows.real, decoding.repetition_penalty)
    if step < decoding.min_new_tokens and len(ends):
        scores = scores.index_fill(1, ends, float("-inf"))
    # Below the smallest temperature that float32 scores survive, sampling and greedy are the same.
    if decoding.temperature < 1e-6:
        return scores.argmax(-1)
    scores = keep_top_p(keep_top_k(scores / decoding.temperature, decoding.top_k), decoding.top_p)
    return draw(scores, rows.keys, step)
