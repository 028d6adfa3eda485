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
from typing import Any, Literal

import torch
from torch import Tensor

from dufu.compat import attention_block, attention_block_backward
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
        hidden: what is hidden of the keys: "nothing", from each query the keys "after" its place, or "some".
    """

    rows: slice
    columns: slice
    places: slice
    hidden: Literal["nothing", "after", "some"]


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

    def fused(self, q: Tensor, bias: Tensor | None) -> bool:
        """Say whether PyTorch's kernel computes the pairs: the CPU's, where neither dropout nor a mask that needs a tensor is asked for."""
        return q.device.type == "cpu" and self.dropout is None and self.mask.allowed is None and bias is None

    def pairs(self, source: int, q: Tensor, k: Tensor, whole: bool) -> Iterator[_Pair]:
        """Yield which of the queries (B, H, T, D) here meet which keys (B, …, S, D) of process `source`'s block.

        Args:
            whole: leave the pairs as large as they are, whatever `MOST_SCORES` says.
        """
        queries, size, half = q.shape[2], self.communicator.size, k.shape[2] // 2
        step = queries if whole else max(1, MOST_SCORES // (q.shape[0] * q.shape[1] * half))
        holder = self.communicator.rank if faults.active("context.order_of_ranks") else source
        for number, chunk in enumerate(chunks_of(source, size)):
            columns = slice(number * half, (number + 1) * half)
            place = chunks_of(holder, size)[number] * half
            for first, last, hidden in self._rows(chunk, queries):
                for row in range(first, last, step):
                    yield _Pair(slice(row, min(row + step, last)), columns, slice(place, place + half), hidden)

    def _rows(self, chunk: int, queries: int) -> Iterator[tuple[int, int, Literal["nothing", "after", "some"]]]:
        """Yield which queries here see something of a chunk of keys, and what is hidden from them."""
        some: Literal["nothing", "some"] = "nothing" if self.mask.allowed is None else "some"
        if not self.mask.looks_back:
            yield 0, queries, some
            return
        half = queries // 2
        for number, mine in enumerate(chunks_of(self.communicator.rank, self.communicator.size)):
            if mine >= chunk:
                yield number * half, (number + 1) * half, "after" if mine == chunk and self.mask.causal else some

    def scores(self, pair: _Pair, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        """Return the scores of a pair's queries and keys, float32."""
        scores = torch.matmul(q * self.scale, k.transpose(-1, -2)).float()  # scaled first, so that fp16 does not overflow
        if bias is not None:
            scores = scores + cut(bias, pair.rows, pair.places)
        allowed = None if pair.hidden == "nothing" else self.mask.part(pair.rows, pair.places)
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
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        total = torch.full(q.shape[:-1], float("-inf"), device=q.device)  # logarithms of the sums of exponentials so far
        fused = ring.fused(q, bias)
        for source, block in _Travel(ring.communicator, torch.stack((k, v))):
            for pair in ring.pairs(source, q, k, fused):
                rows = pair.rows
                keys, values = (_grouped(x[:, :, pair.columns], q.shape[1]) for x in block.unbind(0))
                if fused:
                    found, part = attention_block(q[:, :, rows], keys, values, pair.hidden == "after", ring.scale)
                else:
                    found, part = _attend(ring, pair, q[:, :, rows], keys, values, bias)
                before = total[:, :, rows]
                after = torch.logaddexp(before, part)
                old, new = ((x - _finite(after)).exp().unsqueeze(-1) for x in (before, part))
                out[:, :, rows] = out[:, :, rows] * old + found.float() * new
                total[:, :, rows] = after
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, result, total)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, total = ctx.saved_tensors
        ring: Ring = ctx.ring
        kv_heads, fused = k.shape[1], ring.fused(q, bias)
        queries = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        biases = torch.zeros(bias.shape, dtype=torch.float32, device=q.device) if ctx.needs_input_grad[3] else None
        coming: Tensor | None = None
        works: list[Any] = []
        for source, block in _Travel(ring.communicator, torch.stack((k, v))):
            mine = torch.zeros(block.shape, dtype=torch.float32, device=q.device)
            for pair in ring.pairs(source, q, k, fused):
                keys, values = (_grouped(x[:, :, pair.columns], q.shape[1]) for x in block.unbind(0))
                of_all = tuple(x[:, :, pair.rows] for x in (grad, q, out, total))
                found: tuple[Tensor, ...]
                if fused:
                    upper, some, result, sums = of_all
                    triangle = pair.hidden == "after"
                    found = attention_block_backward(upper, some, keys, values, result, sums, triangle, ring.scale)
                else:
                    found = _attend_backward(ring, pair, of_all, keys, values, bias)
                    if biases is not None:
                        part = cut(biases, pair.rows, pair.places)
                        part += found[3].sum_to_size(part.shape)
                queries[:, :, pair.rows] += found[0].float()
                mine[0, :, :, pair.columns] += _ungrouped(found[1].float(), kv_heads)
                mine[1, :, :, pair.columns] += _ungrouped(found[2].float(), kv_heads)
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


def _attend(ring: Ring, pair: _Pair, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what a pair's queries attend to of its keys, and the logarithms of the sums of exponentials."""
    scores = ring.scores(pair, q, k, bias)
    sums = scores.logsumexp(-1)
    probs = (scores - _finite(sums).unsqueeze(-1)).exp()
    factor = ring.kept(pair, q.shape[1])
    probs = probs if factor is None else probs * factor
    return torch.matmul(probs.to(v.dtype), v), sums


def _attend_backward(
    ring: Ring, pair: _Pair, of_all: tuple[Tensor, ...], k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a pair's share of the gradients of its queries, keys and values, and the gradient of its scores.

    Args:
        of_all: of the pair's queries: the gradient of their output over all keys, they themselves, that output, and the logarithms of
            the sums of exponentials over all keys.
    """
    grad, q, out, sums = of_all
    mean = (grad.float() * out.float()).sum(-1, keepdim=True)  # Σ over all keys of probability · its gradient
    probs = (ring.scores(pair, q, k, bias) - _finite(sums).unsqueeze(-1)).exp()
    factor = ring.kept(pair, q.shape[1])
    dropped = probs if factor is None else probs * factor
    of_values = torch.matmul(dropped.to(grad.dtype).transpose(-1, -2), grad)
    of_probs = torch.matmul(grad, v.transpose(-1, -2)).float()
    of_probs = of_probs if factor is None else of_probs * factor
    of_scores = probs * (of_probs - mean)
    rounded = of_scores.to(q.dtype)
    return (
        torch.matmul(rounded, k).float() * ring.scale,
        torch.matmul(rounded.transpose(-1, -2), q * ring.scale),
        of_values,
        of_scores,
    )


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
