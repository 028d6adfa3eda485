"""Decoding with an encoder-decoder model: the prompt is encoded once, and the decoder writes one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dufu.data.seq2seq import start_token
from dufu.data.tokenizer import TextTokenizer
from dufu.errors import ConfigError
from dufu.generation.decoding import Decoding, Rows, grow, keep_rows
from dufu.generation.sampling import row_keys
from dufu.layers.attention import KeyValueCache
from dufu.models.chain import Batch


def encode_source(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Return the tokens of a text as an encoder reads it: with what the tokenizer puts around it, or else the end token after it."""
    plain, whole = tokenizer.encode(text), list(tokenizer.tokenizer.encode(text).ids)
    return whole if whole != plain else [*plain, tokenizer.eod] if plain else []


def first_token(model: Any, tokenizer: TextTokenizer) -> int:
    """Return what the model's decoder begins with."""
    return start_token(tokenizer) if model.start_token is None else int(model.start_token)


def target_room(decoding: Decoding, model: Any, length: int) -> int:
    """Return how many tokens the decoder may write after a prompt of `length` tokens.

    Raises:
        ConfigError: the prompt, or the tokens asked for, do not fit; the message names the numbers.
    """
    longest = model.longest
    if longest is not None and length > longest:
        raise ConfigError(f"the prompt has {length} tokens, but the encoder has {longest} positions")
    most = min(n for n in (longest, None if decoding.max_length is None else decoding.max_length - 1, 1 << 30) if n is not None)
    if most < 1:
        raise ConfigError(f"max_length={decoding.max_length}: at least 2, the decoder's first token and a new one")
    count = decoding.max_new_tokens or min(64, most)
    if count > most:
        raise ConfigError(f"max_new_tokens={decoding.max_new_tokens}, but at most {most} new tokens fit into the decoder")
    if decoding.min_new_tokens > count:
        raise ConfigError(f"min_new_tokens={decoding.min_new_tokens}, but at most {count} come")
    return count


@dataclass
class _TargetRows(Rows):
    """What the decoder has written so far, and the prompts that it reads, padded on the right."""

    source: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # (B, S)
    given: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # (B, S) bool, false for padding
    memory: list[KeyValueCache] | None = None

    def keep(self, rows: Tensor) -> None:
        """See Rows."""
        if bool(rows.all()) or not bool(rows.any()):
            return
        super().keep(rows)
        self.source, self.given = self.source[rows], self.given[rows]
        keep_rows(self.memory, rows)

    def batch(self, step: int) -> Batch:
        """Return what the model reads at a step: with caches, from the second one on, the last token alone."""
        later = self.caches is not None and step > 0
        new = 1 if later else self.tokens.shape[1]
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        target = Batch(self.tokens[:, -new:], positions=places[:, -new:], caches=self.caches, last_only=True)
        padding = None if bool(self.given.all()) else self.given
        return Batch(self.source, padding=padding, caches=self.memory, decoder=target, encoded=later)


@torch.no_grad()
def decode_target(
    model: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    device: torch.device,
    start: int,
    on_token: Callable[[list[int]], None] | None = None,
    repeats: Sequence[int] | None = None,
    vocabulary: int | None = None,
    forward: Callable[[Batch], Tensor] | None = None,
) -> list[list[int]]:
    """Write what an encoder-decoder model answers to each prompt.

    Args:
        model: an EncoderDecoder in evaluation mode.
        start: the decoder's first token, which is not part of the text.
        others: those of `decoding.decode`.

    Returns:
        The tokens of each row, without the end token.
    """
    if any(not prompt for prompt in prompts):
        raise ConfigError("a prompt has no tokens; give at least one character")
    if not prompts:
        return []
    longest, count = max(map(len, prompts)), len(prompts)
    source = torch.zeros(count, longest, dtype=torch.int64, device=device)
    given = torch.zeros(count, longest, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        source[row, : len(prompt)] = torch.tensor(prompt, device=device)
        given[row, : len(prompt)] = True
    rows = _TargetRows(
        number=torch.arange(count, device=device),
        tokens=torch.full((count, 1), start, dtype=torch.int64, device=device),
        real=torch.ones(count, 1, dtype=torch.bool, device=device),
        keys=row_keys(decoding.seed, prompts, repeats or [0] * count, device),
        limits=torch.tensor([target_room(decoding, model, len(prompt)) for prompt in prompts], device=device),
        caches=model.new_caches() if decoding.use_cache else None,
        source=source,
        given=given,
        memory=model.new_caches() if decoding.use_cache else None,
    )

    def scores_of(step: int) -> Tensor:
        scores: Tensor = (forward or model)(rows.batch(step))
        return scores[:, -1].float()

    return grow(rows, scores_of, decoding, on_token, vocabulary)


__all__ = ["decode_target", "encode_source", "first_token", "target_room"]
