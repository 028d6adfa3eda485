"""Other programs' models, from their names and conventions alone, in plain torch: nothing of dufu's takes part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

LAYERS, HIDDEN, HEADS, INNER, VOCAB, LENGTH = 2, 16, 4, 24, 37, 12
SIZE = HIDDEN // HEADS
State = dict[str, Tensor]
Qkv = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # (B, T, 3H) → three (B, T, heads, size)


def by_head(fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LiBai; Megatron-LM from version 2: each head's query, key, value."""
    q, k, v = fused.view(*fused.shape[:2], HEADS, 3 * SIZE).chunk(3, -1)
    return q, k, v


def by_kind(fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron-LM version 0: all queries, all keys, all values."""
    q, k, v = (part.view(*fused.shape[:2], HEADS, SIZE) for part in fused.chunk(3, -1))
    return q, k, v


def by_feature(fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron-LM version 1: each feature's query, key, value."""
    q, k, v = fused.view(*fused.shape[:2], HEADS, SIZE, 3).unbind(-1)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(SIZE)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


def norm(x: Tensor, state: Mapping[str, Tensor], name: str, eps: float = 1e-5) -> Tensor:
    return functional.layer_norm(x, (HIDDEN,), state[f"{name}.weight"], state[f"{name}.bias"], eps)


def uer_norm(x: Tensor, state: Mapping[str, Tensor], name: str) -> Tensor:
    """UER-py's: the sample's deviation, and what is added to it."""
    deviation = x.std(-1, keepdim=True)
    return state[f"{name}.gamma"] * (x - x.mean(-1, keepdim=True)) / (deviation + 1e-6) + state[f"{name}.beta"]


def affine(x: Tensor, state: Mapping[str, Tensor], name: str) -> Tensor:
    return functional.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


@dataclass(frozen=True)
class Names:
    """Where a layer's parts are: `{}` is its number."""

    layer: str
    first: str
    second: str
    dense: str
    inner: str
    outer: str
    qkv: tuple[str, ...]  # one fused name, or three


def run_layer(
    x: Tensor, state: State, names: Names, number: int, qkv: Qkv, causal: bool, pre: bool, act: Callable[[Tensor], Tensor],
    normed: Callable[[Tensor, Mapping[str, Tensor], str], Tensor] = norm,
) -> Tensor:  # fmt: skip
    at = names.layer.format(number)

    def branch_one(h: Tensor) -> Tensor:
        if len(names.qkv) == 1:
            q, k, v = qkv(affine(h, state, f"{at}.{names.qkv[0]}"))
        else:
            q, k, v = (affine(h, state, f"{at}.{name}").view(*h.shape[:2], HEADS, SIZE) for name in names.qkv)
        return affine(attend(q, k, v, causal), state, f"{at}.{names.dense}")

    def branch_two(h: Tensor) -> Tensor:
        return affine(act(affine(h, state, f"{at}.{names.inner}")), state, f"{at}.{names.outer}")

    if pre:
        x = x + branch_one(normed(x, state, f"{at}.{names.first}"))
        return x + branch_two(normed(x, state, f"{at}.{names.second}"))
    x = normed(x + branch_one(x), state, f"{at}.{names.first}")
    return normed(x + branch_two(x), state, f"{at}.{names.second}")


MEGATRON_LIKE = Names(
    "", "input_layernorm", "post_attention_layernorm", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
    ("self_attention.query_key_value",),
)  # fmt: skip
UER = Names(
    "encoder.transformer.{}", "layer_norm_1", "layer_norm_2", "self_attn.final_linear", "feed_forward.linear_1",
    "feed_forward.linear_2", tuple(f"self_attn.linear_layers.{kind}" for kind in range(3)),
)  # fmt: skip
FAIRSEQ = Names(
    "", "self_attn_layer_norm", "final_layer_norm", "self_attn.out_proj", "fc1", "fc2",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
)  # fmt: skip


def filled(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> State:
    """Return random weights: norms near one, the rest of the size that keeps activations alive."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=draw) * 0.3
        found[name] = value + 1 if ("norm" in name and name.endswith((".weight", ".gamma"))) else value
    return found


def linear_shapes(name: str, rows: int, cols: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, cols), f"{name}.bias": (rows,)}


def norm_shapes(name: str, leaves: tuple[str, str] = ("weight", "bias")) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{leaf}": (HIDDEN,) for leaf in leaves}


def layer_shapes(names: Names, leaves: tuple[str, str] = ("weight", "bias")) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for number in range(LAYERS):
        at = names.layer.format(number)
        for name in names.qkv:
            found |= linear_shapes(f"{at}.{name}", HIDDEN * 3 // len(names.qkv), HIDDEN)
        found |= linear_shapes(f"{at}.{names.dense}", HIDDEN, HIDDEN)
        found |= linear_shapes(f"{at}.{names.inner}", INNER, HIDDEN) | linear_shapes(f"{at}.{names.outer}", HIDDEN, INNER)
        found |= norm_shapes(f"{at}.{names.first}", leaves) | norm_shapes(f"{at}.{names.second}", leaves)
    return found


def some_ids(low: int = 0) -> Tensor:
    return torch.randint(low, VOCAB, (2, 9), generator=torch.Generator().manual_seed(5))
