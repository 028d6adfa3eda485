"""The peer: the same GPT as plain PyTorch, its training loop as short as one would write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from dufu.parallel.process import settle_allocator


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(c, -1))
        p = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + functional.dropout(self.out(y.transpose(1, 2).reshape(b, t, c)), p)
        y = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + functional.dropout(self.down(y), p)


class PlainGPT(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.dropout(self.word(ids) + self.position(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.word.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(shape: dict[str, Any], batch: int, bf16: bool, wrap: str = "", keep_memory: bool = False) -> Callable[[], None]:
    """Return one training step on random tokens.

    Args:
        shape: arguments of PlainGPT.
        batch: samples on each process.
        bf16: autocast.
        keep_memory: let the C library keep freed memory, as dufu does.
        wrap: "" for one process, "ddp" or "fsdp2" for PyTorch's own data parallelism.
    """
    if keep_memory:
        settle_allocator()
    torch.manual_seed(0)
    model: nn.Module = PlainGPT(**shape)
    if wrap:
        dist.init_process_group("gloo")
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif wrap == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(shape["vocab"], (batch, shape["length"] + 1))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step
