"""Multi-head attention: self or cross, grouped queries, a cache, any mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.errors import ConfigError, LayoutError
from dufu.layers.dropout import Dropout
from dufu.layers.initial import Initial
from dufu.layers.linear import Linear
from dufu.layers.mask import Mask, as_mask
from dufu.layers.rotary import Rotation, rotate


@dataclass
class KeyValueCache:
    """Keys and values of one layer for the tokens seen so far: (B, kv heads of this process, S, head size)."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new positions and return all."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), 2), torch.cat((self.values, values), 2)
        self.keys, self.values = keys, values
        return keys, values


def scaled_dot_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    dropout: Dropout | None = None,
    keys: Tensor | None = None,
    first_head: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale + bias, over allowed keys) v.

    Without dropout PyTorch's fused kernel does it. With dropout the product is explicit: the fused kernel on CPU has none, and no
    kernel draws our mask. A query with nothing to attend to gives zeros, and zero gradients.

    Args:
        q: (B, H, T, D); k, v: (B, H or fewer, S, D), fewer heads being shared by groups of queries.
        mask: what is allowed.
        scale: factor on the scores.
        dropout: applied to the probabilities.
        keys: (B, T) dropout keys of the queries.
        first_head: number of this process's first head in the whole layer.
        bias: added to the scores, broadcastable to (B, H, T, S).
    """
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    if dropout is not None and dropout.training and dropout.p > 0:
        out = _explicit(q, k, v, mask, scale, dropout, keys, first_head, bias)
    else:
        out = _fused(q, k, v, mask, scale, bias)
    return out if mask.empty is None else out.masked_fill(mask.empty, 0.0)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, bias: Tensor | None) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    # The kernel's own causal mask aligns the first query with the first key; ours the last with the last.
    if bias is None and mask.causal and queries == keys and (mask.held is None or mask.held.rows is None):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    dense = mask.dense(queries, keys, q.device)
    if bias is not None:
        dense = (bias if dense is None else bias.masked_fill(~dense, float("-inf"))).to(q.dtype)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, scale=scale)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    dropout: Dropout,
    keys: Tensor | None,
    first_head: int,
    bias: Tensor | None,
) -> Tensor:
    scores = torch.matmul(q * scale, k.transpose(-1, -2))  # scaled first, so that fp16 does not overflow
    if bias is not None:
        scores = scores + bias
    dense = mask.dense(q.shape[2], k.shape[2], q.device)
    if dense is not None:
        scores = scores.masked_fill(~dense, float("-inf"))
    probs = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(dropout.attention(probs, keys, first_head), v)


class Reach:
    """The seam between attention and context parallelism: how queries reach the keys they may attend to.

    By itself a process holds all keys. `dufu.parallel` puts another object in the place of `HERE` where it holds some.
    """

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scale: float,
        dropout: Dropout,
        keys: Tensor | None,
        first_head: int,
        bias: Tensor | None,
    ) -> Tensor:
        """Return what the queries of this process attend to; the arguments are those of `scaled_dot_product`."""
        return scaled_dot_product(q, k, v, mask, scale, dropout, keys, first_head, bias)


HERE = Reach()


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al., 2017), with grouped queries (Ainslie et al., 2023).

    Args:
        hidden_size: width of the input and output.
        num_attention_heads: heads of the whole layer.
        num_key_value_heads: heads of keys and values; None = as many as query heads.
        head_size: None = hidden_size / num_attention_heads.
        is_cross_attention: keys and values come from another sequence.
        attention_dropout_prob: on the probabilities.
        bias: whether the projections have biases.
        output_bias: whether the output projection has one; None = as `bias`.
        head_norm: makes the norm of each head's query and key from the head size, such as HeadRMSNorm; None = no norm.
        window: a query sees the last so many keys up to its own place; None = all.
        init, output_init: how the input and the output projections begin.
        scale: factor on the scores; None = 1/√head_size.

    Shapes: hidden (B, T, hidden_size), memory (B, S, hidden_size) → (B, T, hidden_size).

    Raises:
        LayoutError: a width or a number of heads does not divide. ConfigError: a window or norms of heads in cross attention.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int | None = None,
        head_size: int | None = None,
        is_cross_attention: bool = False,
        attention_dropout_prob: float = 0.0,
        bias: bool = True,
        init: Initial | None = None,
        output_init: Initial | None = None,
        scale: float | None = None,
        output_bias: bool | None = None,
        head_norm: Callable[[int], nn.Module] | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        if window is not None and window < 1:
            raise ConfigError(f"an attention window of {window} tokens: at least 1, or null for all")
        if is_cross_attention and (window is not None or head_norm is not None):
            raise ConfigError("Attention: window and head_norm are of self-attention; leave them out of cross attention")
        self.heads, self.kv_heads = num_attention_heads, num_key_value_heads or num_attention_heads
        if head_size is None and hidden_size % num_attention_heads:
            raise LayoutError(f"hidden_size {hidden_size} does not divide over {num_attention_heads} attention heads")
        if self.heads % self.kv_heads:
            raise LayoutError(f"{self.heads} attention heads do not divide into groups for {self.kv_heads} key-value heads")
        self.head_size = head_size or hidden_size // num_attention_heads
        self.scale = 1.0 / math.sqrt(self.head_size) if scale is None else scale
        self.is_cross_attention, self.window = is_cross_attention, window
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        if is_cross_attention:
            self.query = Linear(hidden_size, q, bias, "col", init)
            self.key_value = Linear(hidden_size, 2 * kv, bias, "col", init, sections=(kv, kv))
        else:
            self.query_key_value = Linear(hidden_size, q + 2 * kv, bias, "col", init, sections=(q, kv, kv))
        self.output = Linear(q, hidden_size, bias if output_bias is None else output_bias, "row", output_init or init)
        self.query_norm = head_norm(self.head_size) if head_norm else None
        self.key_norm = head_norm(self.head_size) if head_norm else None
        self.dropout = Dropout(attention_dropout_prob)
        self.reach: Reach = HERE

    def check_split(self, parts: int) -> None:
        """Raise LayoutError when the heads do not divide over `parts` processes."""
        for what, count in (("attention heads", self.heads), ("key-value heads", self.kv_heads)):
            if count % parts:
                fits = [n for n in range(1, parts) if self.heads % n == 0 and self.kv_heads % n == 0]
                raise LayoutError(
                    f"{count} {what} do not divide over tensor_parallel_size={parts}; the nearest size that fits is {fits[-1]}"
                )

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        return heads

    def forward(
        self,
        hidden: Tensor,
        mask: Mask | Tensor | None = None,
        keys: Tensor | None = None,
        memory: Tensor | None = None,
        cache: KeyValueCache | None = None,
        bias: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            hidden: (B, T, hidden_size).
            mask: a Mask, or a bool tensor broadcastable to (B, H, T, S), True where attention is allowed; None = everywhere.
            keys: (B, T) dropout keys of the tokens.
            memory: (B, S, hidden_size), the other sequence of cross attention.
            cache: keys and values of earlier tokens; new ones are added. Cross attention computes `memory`'s once.
            bias: added to the scores, broadcastable to (B, heads of this process, T, S); T and S as in the mask.
            rotation: of queries and keys, from RotaryEmbedding.

        Raises:
            ConfigError: cross attention without memory, or memory or a rotation where they mean nothing.
        """
        if self.is_cross_attention:
            if rotation is not None:
                raise ConfigError("cross attention has no common positions to rotate by; leave rotation out")
            q, k, v = self._across(hidden, memory, cache)
        else:
            if memory is not None:
                raise ConfigError("memory was given to self-attention; build Attention(..., is_cross_attention=True)")
            q, k, v = self._within(hidden, cache, rotation)
        first_head = self.output.split.rank * q.shape[1]
        seen = as_mask(mask).near(self.window, q.shape[2], k.shape[2], q.device)
        out = self.reach.attend(q, k, v, seen, self.scale, self.dropout, keys, first_head, bias)
        result: Tensor = self.output(out.transpose(1, 2).flatten(2))
        return result

    def _within(self, hidden: Tensor, cache: KeyValueCache | None, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.output.split.size
        own, own_kv = self.heads // parts * self.head_size, self.kv_heads // parts * self.head_size
        q, k, v = (self._heads(t) for t in self.query_key_value(hidden).split((own, own_kv, own_kv), -1))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return (q, k, v) if cache is None else (q, *cache.append(k, v))

    def _across(self, hidden: Tensor, memory: Tensor | None, cache: KeyValueCache | None) -> tuple[Tensor, Tensor, Tensor]:
        q = self._heads(self.query(hidden))
        if cache is not None and cache.keys is not None and cache.values is not None:
            return q, cache.keys, cache.values
        if memory is None:
            raise ConfigError("cross attention needs memory, the sequence to attend to")
        k, v = (self._heads(t) for t in self.key_value(memory).chunk(2, -1))
        return (q, k, v) if cache is None else (q, *cache.append(k, v))
