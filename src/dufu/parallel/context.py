"""Context parallelism: several processes share the positions of every sample, and queries reach the keys of all of them.

Which positions a process holds, `parallel/view.py` says. There are three ways to reach the others' keys:

- all_gather: keys and values of all tokens are gathered, and their gradients reduced and scattered. Memory of keys grows with the
  whole length; few, large messages; grouped key-value heads make them small (Llama 3's report, Dubey et al., 2024).
- all_to_all: heads are exchanged for positions and back (Jacobs et al., "DeepSpeed Ulysses", 2023). The heads must divide.
- ring: blocks of keys and values travel round, each process adding what its queries see of them (Liu et al., "Ring attention", 2023);
  see `parallel/ring.py`.

`attention_bytes` is the closed formula of what each hands to its operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dufu.errors import ConfigError, LayoutError, NotBuiltError
from dufu.layers.attention import Attention, Reach, scaled_dot_product
from dufu.layers.dropout import Dropout, DropPath
from dufu.layers.mask import Mask
from dufu.layers.transformer import TransformerLayer
from dufu.parallel import faults
from dufu.parallel.collectives import Communicator
from dufu.parallel.ring import Ring, cut, ring_attention
from dufu.parallel.view import chunks_of, view_of


def attention_bytes(
    method: str,
    size: int,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    head_size: int,
    itemsize: int,
    backward: bool = False,
) -> dict[str, int]:
    """Return the bytes that one attention layer hands to each operation on one process.

    Args:
        method: one of `layout.CONTEXT_METHODS`.
        size: processes that share a sample.
        heads, kv_heads: of this process.
        length: tokens that this process holds of each sample, of queries and keys alike.
        itemsize: bytes of a number.
        backward: of backward instead of forward.
    """
    kv = 2 * batch * kv_heads * length * head_size
    if method == "all_gather":
        return {"reduce_scatter": size * kv * itemsize} if backward else {"all_gather": kv * itemsize}
    if method == "all_to_all":
        return {"all_to_all": (kv + 2 * batch * heads * length * head_size) * itemsize}
    # Gradients of keys and values travel as float32, and once more, to where they belong.
    return {"send": (size - 1) * kv * itemsize + (size * kv * 4 if backward else 0)}


def in_order(parts: Tensor, shuffled: bool = False) -> Tensor:
    """Put the tokens of all processes in the order of their places: (p, …, L, D) → (…, p · L, D)."""
    half = parts.shape[-2] // 2
    if shuffled:
        return torch.cat(list(parts), -2)
    early, late = parts.split(half, -2)
    return torch.cat([*early, *late.flip(0)], -2)


def by_process(x: Tensor, size: int) -> Tensor:
    """Undo `in_order`: (…, p · L, D) → (p, …, L, D)."""
    chunks = x.chunk(2 * size, -2)
    return torch.stack([torch.cat([chunks[c] for c in chunks_of(rank, size)], -2) for rank in range(size)])


class _Gather(torch.autograd.Function):
    """Gather forward, sum and scatter the gradients backward: (…) → (p, …)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        out = torch.empty((communicator.size, *x.shape), dtype=x.dtype, device=x.device)
        communicator.gather_into(out.view(-1), x.contiguous().view(-1))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        communicator = ctx.communicator
        if faults.active("context.skip_key_gradient"):
            return grad[communicator.rank], None
        return communicator.reduce_scatter(grad.contiguous().view(-1), grad.dtype).view(grad.shape[1:]), None


class _Exchange(torch.autograd.Function):
    """Send row i of (p, N) to process i; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return communicator.exchange(x, [1] * communicator.size, [1] * communicator.size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.communicator.exchange(grad, [1] * ctx.communicator.size, [1] * ctx.communicator.size), None


class ContextReach(Reach):
    """Reaches the keys of the processes that share the samples; while not `active` all keys are here.

    Args:
        communicator: those processes.
    """

    all_rows = False  # whether masks and biases need a row for queries that are not held

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.active = False

    # Messages are no part of a compiled graph.
    @torch.compiler.disable
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
        """See Reach.

        Raises:
            ConfigError: a mask or a bias that does not say which queries its rows are of.
        """
        if not self.active:
            return super().attend(q, k, v, mask, scale, dropout, keys, first_head, bias)
        if mask.held is None or (mask.held.rows is None) is not self.all_rows:
            raise ConfigError(
                "attention over samples that processes share needs a mask that says which tokens its rows are of: build it by "
                "build_mask(..., held=batch.held)"
            )
        rows = mask.held.total if self.all_rows else q.shape[2]
        if bias is not None and bias.shape[-2] not in (1, rows):
            raise ConfigError(
                f"an attention bias has {bias.shape[-2]} rows, but the mask is of {rows} queries; make it for the places batch.held.rows"
            )
        return self._attend(q, k, v, mask, scale, dropout, keys, first_head, bias)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *rest: Any) -> Tensor:
        raise NotImplementedError


class _AllGather(ContextReach):
    def _attend(
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
        shuffled = faults.active("context.order_of_ranks")
        k, v = in_order(_Gather.apply(torch.stack((k, v)), self.communicator), shuffled)
        if not mask.looks_back:
            return scaled_dot_product(q, k, v, mask, scale, dropout, keys, first_head, bias)
        # Of each of its two chunks' queries no one sees the keys behind the chunk: half of the products are spared.
        half, out = q.shape[2] // 2, []
        for number, chunk in enumerate(chunks_of(self.communicator.rank, self.communicator.size)):
            rows, seen = slice(number * half, (number + 1) * half), slice(0, (chunk + 1) * half)
            part = Mask(causal=True) if mask.causal else Mask(mask.part(rows, seen), may_be_empty=False)
            out.append(
                scaled_dot_product(
                    q[:, :, rows], k[:, :, seen], v[:, :, seen], part, scale, dropout, None if keys is None else keys[:, rows],
                    first_head, None if bias is None else cut(bias, rows, seen),
                )
            )  # fmt: skip
        joined = torch.cat(out, 2)
        return joined if mask.empty is None else joined.masked_fill(mask.empty, 0.0)


class _AllToAll(ContextReach):
    all_rows = True

    def _attend(
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
        size, rank = self.communicator.size, self.communicator.rank
        rows = [x.unflatten(1, (size, -1)).transpose(0, 1).reshape(size, -1) for x in (q, k, v)]
        received = _Exchange.apply(torch.cat(rows, 1), self.communicator).split([r.shape[1] for r in rows], 1)
        shuffled = faults.active("context.order_of_ranks")
        q, k, v = (
            in_order(part.view(size, x.shape[0], -1, *x.shape[2:]), shuffled and x is not q) for part, x in zip(received, (q, k, v))
        )
        heads = q.shape[1]
        if bias is not None and bias.shape[1] > 1:
            bias = bias[:, rank * heads : (rank + 1) * heads]
        assert mask.held is not None
        out = scaled_dot_product(q, k, v, mask, scale, dropout, mask.held.keys, first_head + rank * heads, bias)
        back = by_process(out, size)
        return torch.cat(list(_Exchange.apply(back.flatten(1), self.communicator).view(back.shape)), 1)


class _InTurns(ContextReach):
    def _attend(
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
        dropped = dropout if dropout.training and dropout.p > 0 else None
        if dropped is not None and keys is None:
            raise ConfigError("ring attention draws its dropout twice and needs dropout keys (Batch.keys)")
        ring = Ring(self.communicator, mask, scale, dropped, keys, first_head)
        return ring_attention(q, k, v, bias, ring)


_METHODS: dict[str, type[ContextReach]] = {"all_gather": _AllGather, "all_to_all": _AllToAll, "ring": _InTurns}


def split_context(model: nn.Module, communicator: Communicator, method: str) -> None:
    """Let the processes of a communicator share the positions of every sample that is scored. Layers are split by tensor already.

    Args:
        model: a ChainModel.
        communicator: the context-parallel processes.
        method: one of `layout.CONTEXT_METHODS`.

    Raises:
        LayoutError: no ChainModel, or heads that do not divide where the method needs it.
        NotBuiltError: whole branches dropped elsewhere than in a TransformerLayer.
    """
    if communicator.size == 1:
        return
    view = view_of(model, "train.dist.context_parallel_size")
    reach = _METHODS[method](communicator)
    _check_branches(model)
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            if method == "all_to_all":
                _check_heads(name, module, communicator.size)
            module.reach = reach
    view.context, view.all_rows = communicator, reach.all_rows
    view.seams.append(reach)


def _check_branches(model: nn.Module) -> None:
    known = {part for layer in model.modules() if isinstance(layer, TransformerLayer) for part in layer.children()}
    for name, module in model.named_modules():
        if isinstance(module, DropPath) and module.p > 0 and module not in known:
            raise NotBuiltError(
                f"{name}: where processes share samples, only a TransformerLayer knows the first token that decides whether a branch is "
                f"dropped; set its probability to 0, or train.dist.context_parallel_size=1"
            )


def _check_heads(name: str, layer: Attention, size: int) -> None:
    parts = layer.output.split.size
    for what, count in (("attention heads", layer.heads), ("key-value heads", layer.kv_heads)):
        if count // parts % size:
            of = f" ({count // parts} on each of {parts} tensor-parallel processes)" if parts > 1 else ""
            fits = [n for n in range(1, size) if layer.heads // parts % n == 0 and layer.kv_heads // parts % n == 0]
            raise LayoutError(
                f"{name}: {count} {what}{of} do not divide over train.dist.context_parallel_size={size}, which "
                f"context_parallel_method=all_to_all needs; the nearest size that fits is {fits[-1]}; all_gather and ring need no such thing"
            )
