"""Ring attention: blocks of keys and values travel from process to process, and each adds what its queries see of them.

(Liu et al., "Ring attention with blockwise transformers", 2023.) Softmax over keys that come in parts: each part has an output and the
logarithm of its sum of exponentials, and two parts are merged by these (as in flash attention, Dao et al., 2022). Backward makes the
probabilities anew from that logarithm, and lets the gradients of a block's keys and values travel with it until they are home.

A block is seen as two chunks, each of contiguous places, so that a chunk which no query sees is left out. Scores of a chunk exist for as
many queries at a time as `MOST_SCORES` allows, so memory does not grow with the square of the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dufu.layers.dropout import Dropout
from dufu.layers.mask import Mask
from dufu.layers.random import keep_scale
from dufu.parallel import faults
from dufu.parallel.collectives import Communicator
from dufu.parallel.view import chunks_of

MOST_SCORES = 1 << 25  # numbers of one pair's scores, of all samples and heads


@dataclass(frozen=True)
class _Pair:
    """Queries that meet keys.

    Args:
        rows: the queries, of those here.
        columns: the keys, of those of the block.
        places: the keys' places in the whole sample.
        masked: whether some of the keys are hidden from some of the queries.
    """

    rows: slice
    columns: slice
    places: slice
    masked: bool


@dataclass(frozen=True)
class Ring:
    """What one attention layer's ring is about.

    Args:
        communicator: the processes that share the samples.
        mask: rows of the queries here × all keys.
        scale: factor on the scores.
        dropout: of the probabilities; None = none now.
        keys: (B, T) dropout keys of the queries here.
        first_head: number of this process's first head in the whole layer.
    """

    communicator: Communicator
    mask: Mask
    scale: float
    dropout: Dropout | None
    keys: Tensor | None
    first_head: int

    def pairs(self, source: int, q: Tensor, k: Tensor) -> Iterator[_Pair]:
        """Yield which of the queries (B, H, T, D) here meet which keys (B, …, S, D) of process `source`'s block."""
        queries, size, half = q.shape[2], self.communicator.size, k.shape[2] // 2
        step = max(1, MOST_SCORES // (q.shape[0] * q.shape[1] * half))
        early, late = chunks_of(self.communicator.rank, size)
        holder = self.communicator.rank if faults.active("context.order_of_ranks") else source
        for number, chunk in enumerate(chunks_of(source, size)):
            columns = slice(number * half, (number + 1) * half)
            place = chunks_of(holder, size)[number] * half
            first, earliest = 0, early
            if self.mask.looks_back and early < chunk:
                if late < chunk:
                    continue
                first, earliest = queries // 2, late
            masked = self.mask.allowed is not None or (self.mask.causal and earliest == chunk)
            for row in range(first, queries, step):
                yield _Pair(slice(row, min(row + step, queries)), columns, slice(place, place + half), masked)

    def scores(self, pair: _Pair, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        """Return the scores of a pair's queries and keys, float32."""
        scores = torch.matmul(q * self.scale, k.transpose(-1, -2)).float()  # scaled first, so that fp16 does not overflow
        if bias is not None:
            scores = scores + cut(bias, pair.rows, pair.places)
        allowed = self.mask.part(pair.rows, pair.places) if pair.masked else None
        return scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))

    def kept(self, pair: _Pair, heads: int) -> Tensor | None:
        """Return the factor of each probability: 0 or the dropout's scale; None without dropout."""
        if self.dropout is None:
            return None
        assert self.keys is not None
        count, first = pair.places.stop - pair.places.start, pair.places.start
        mask = self.dropout.attention_mask(self.keys[:, pair.rows], self.first_head, heads, count, first)
        return mask * keep_scale(self.dropout.p)


def cut(bias: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return the bias of some queries and keys, a dimension of one being of all."""
    bias = bias if bias.shape[-2] == 1 else bias[..., rows, :]
    return bias if bias.shape[-1] == 1 else bias[..., columns]


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Repeat each key-value head for its group of query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _ungrouped(x: Tensor, heads: int) -> Tensor:
    """Sum what the query heads of a group give their key-value head."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


def _finite(x: Tensor) -> Tensor:
    """Return logarithms of sums as something to subtract: those of empty sums as zero."""
    return x.masked_fill(x == float("-inf"), 0.0)


class _Travel:
    """Blocks of keys and values on their way: iterating gives each process's block, this one's first."""

    def __init__(self, communicator: Communicator, block: Tensor) -> None:
        self.communicator, self.block = communicator, block

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        size, rank = self.communicator.size, self.communicator.rank
        for step in range(size):
            works, coming = [], self.block
            if step < size - 1:
                coming = torch.empty_like(self.block)
                works = self.communicator.shift(self.block, coming)
            yield (rank - step) % size, self.block  # the next block is under way meanwhile
            for work in works:
                work.wait()
            self.block = coming


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, ring: Ring) -> Tensor:
        heads, out = q.shape[1], torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        total = torch.full(q.shape[:-1], float("-inf"), device=q.device)  # logarithms of the sums of exponentials so far
        for source, block in _Travel(ring.communicator, torch.stack((k, v))):
            for pair in ring.pairs(source, q, k):
                keys, values = (_grouped(x[:, :, pair.columns], heads) for x in block.unbind(0))
                scores = ring.scores(pair, q[:, :, pair.rows], keys, bias)
                part = scores.logsumexp(-1)
                probs = (scores - _finite(part).unsqueeze(-1)).exp()
                factor = ring.kept(pair, heads)
                probs = probs if factor is None else probs * factor
                found = torch.matmul(probs.to(values.dtype), values).float()
                before = total[:, :, pair.rows]
                after = torch.logaddexp(before, part)
                old, new = ((x - _finite(after)).exp().unsqueeze(-1) for x in (before, part))
                out[:, :, pair.rows] = out[:, :, pair.rows] * old + found * new
                total[:, :, pair.rows] = after
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, result, total)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, total = ctx.saved_tensors
        ring: Ring = ctx.ring
        heads, kv_heads = q.shape[1], k.shape[1]
        queries = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        biases = torch.zeros(bias.shape, dtype=torch.float32, device=q.device) if ctx.needs_input_grad[3] else None
        # Σ over keys of probability · its gradient, the same for all blocks
        mean = (grad.float() * out.float()).sum(-1, keepdim=True)
        coming: Tensor | None = None
        works: list[Any] = []
        for source, block in _Travel(ring.communicator, torch.stack((k, v))):
            mine = torch.zeros(block.shape, dtype=torch.float32, device=q.device)
            for pair in ring.pairs(source, q, k):
                rows = pair.rows
                keys, values = (_grouped(x[:, :, pair.columns], heads) for x in block.unbind(0))
                scores = ring.scores(pair, q[:, :, rows], keys, bias)
                probs = (scores - _finite(total[:, :, rows]).unsqueeze(-1)).exp()
                factor = ring.kept(pair, heads)
                dropped = probs if factor is None else probs * factor
                upper = grad[:, :, rows]
                mine[1, :, :, pair.columns] += _ungrouped(
                    torch.matmul(dropped.to(upper.dtype).transpose(-1, -2), upper).float(), kv_heads
                )
                of_probs = torch.matmul(upper, values.transpose(-1, -2)).float()
                of_probs = of_probs if factor is None else of_probs * factor
                of_scores = probs * (of_probs - mean[:, :, rows])
                rounded = of_scores.to(q.dtype)
                queries[:, :, rows] += torch.matmul(rounded, keys).float() * ring.scale
                mine[0, :, :, pair.columns] += _ungrouped(
                    torch.matmul(rounded.transpose(-1, -2), q[:, :, rows] * ring.scale).float(), kv_heads
                )
                if biases is not None:
                    part = cut(biases, rows, pair.places)
                    part += of_scores.sum_to_size(part.shape)
            for work in works:
                work.wait()
            leaving = mine if coming is None or faults.active("context.skip_key_gradient") else mine + coming
            coming = torch.empty_like(leaving)
            works = ring.communicator.shift(leaving, coming, tag=1)
        for work in works:
            work.wait()
        assert coming is not None
        to_bias = None if biases is None else biases.to(bias.dtype)
        return queries.to(q.dtype), coming[0].to(k.dtype), coming[1].to(v.dtype), to_bias, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, ring: Ring) -> Tensor:
    """Return what the queries here attend to, of the keys of all processes.

    A query with nothing to attend to gives zeros, and zero gradients.

    Args:
        q: (B, H, T, D); k, v: (B, H or fewer, S / p, D), those that this process holds.
        bias: added to the scores, broadcastable to (B, H, T, S).
        ring: the rest.
    """
    with torch.autocast(q.device.type, enabled=False):
        out: Tensor = _RingAttention.apply(q, k.to(q.dtype), v.to(q.dtype), bias, ring)
    return out if ring.mask.empty is None else out.masked_fill(ring.mask.empty, 0.0)
