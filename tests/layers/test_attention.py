"""Attention against PyTorch's own, and where masks are hard: empty rows, a cache, grouped heads, every kernel alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from dufu.errors import ConfigError, LayoutError
from dufu.layers import (
    AlibiBias,
    Attention,
    HeadRMSNorm,
    KeyValueCache,
    Mask,
    RelativeBias,
    RotaryEmbedding,
    TransformerLayer,
    build_mask,
    rotate,
)  # fmt: skip
from dufu.layers.random import token_keys

CLOSE = {"rtol": 1e-5, "atol": 2e-6}  # fp32 products of width 16 in another order


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def same_as_torch(layer: Attention, theirs: nn.MultiheadAttention) -> None:
    """Give our layer the weights of PyTorch's."""
    with torch.no_grad():
        if layer.is_cross_attention:
            q, kv = theirs.in_proj_weight.split((16, 32))
            layer.query.weight.copy_(q)
            layer.key_value.weight.copy_(kv)
            theirs.in_proj_bias.normal_()
            layer.query.bias.copy_(theirs.in_proj_bias[:16])
            layer.key_value.bias.copy_(theirs.in_proj_bias[16:])
        else:
            theirs.in_proj_bias.normal_()
            layer.query_key_value.weight.copy_(theirs.in_proj_weight)
            layer.query_key_value.bias.copy_(theirs.in_proj_bias)
        layer.output.weight.copy_(theirs.out_proj.weight)
        layer.output.bias.copy_(theirs.out_proj.bias)


def explicit(layer: Attention) -> Attention:
    """Let a layer take its own path instead of the fused kernel: its dropout is above zero, but rounds to none of 65536."""
    layer.dropout.p = 2**-18
    return layer.train()


@pytest.mark.parametrize("path", ["fused", "explicit"])
@pytest.mark.parametrize("masked", ["none", "padding", "causal"])
@pytest.mark.parametrize("cross", [False, True])
def test_attention_is_torchs_multihead_attention(path: str, masked: str, cross: bool) -> None:
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    mine = Attention(16, 4, is_cross_attention=cross)
    same_as_torch(mine, theirs)
    x, other = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    memory = other if cross else x
    padding = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    mask = build_mask(causal=masked == "causal", queries=5, padding=padding if masked == "padding" else None)
    wanted, _ = theirs(
        x, memory, memory,
        key_padding_mask=~padding if masked == "padding" else None,
        attn_mask=torch.ones(5, 5).triu(1).bool() if masked == "causal" else None,
    )  # fmt: skip
    if path == "explicit":
        explicit(mine)
    keys = token_keys(0, 0, torch.arange(2), torch.arange(5).expand(2, 5))
    torch.testing.assert_close(mine(x, mask, keys, memory=other if cross else None), wanted, **CLOSE)


def test_without_dropout_the_fused_kernel_does_it_and_with_it_never(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    real = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or real(*a, **k))
    layer = Attention(16, 4).train()
    x = torch.randn(2, 5, 16)
    layer(x, build_mask(causal=True, queries=5))
    assert len(calls) == 1 and calls[0]["is_causal"]
    layer.dropout.p = 0.1
    layer(x)
    assert len(calls) == 1
    layer.eval()(x)
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", ["fused", "explicit", "biased"])
def test_a_row_with_nothing_to_attend_to_is_zero_and_harms_no_other(path: str, dtype: torch.dtype) -> None:
    """B110: left padding under a causal mask leaves queries without keys; a sample may be all padding."""
    layer = Attention(16, 4, bias=False).to(dtype)
    if path == "explicit":
        explicit(layer)
    x = torch.randn(3, 5, 16, dtype=dtype)
    padding = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    bias = AlibiBias(4)(5) if path == "biased" else None
    keys = token_keys(0, 0, torch.arange(3), torch.arange(5).expand(3, 5))
    hidden = x.clone().requires_grad_()
    out = layer(hidden, build_mask(causal=True, queries=5, padding=padding), keys, bias=bias)
    out.float().square().sum().backward()
    assert hidden.grad is not None
    for value in (out, hidden.grad, *(p.grad for p in layer.parameters())):
        assert value is not None and bool(value.isfinite().all())
    assert not out[0, :3].any() and not out[2].any() and not hidden.grad[2].any()
    # what is real equals the sample without its padding; half precision rounds each product by up to 2^-8 (2^-11 for fp16)
    alone = layer(x[:1, 3:], build_mask(causal=True, queries=2), keys[:1, 3:], bias=None if bias is None else bias[..., 3:, 3:])
    torch.testing.assert_close(out[:1, 3:], alone, rtol=1e-5, atol=2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("path", ["fused", "explicit"])
def test_a_users_own_mask_may_have_empty_rows(path: str) -> None:
    layer = Attention(16, 4, bias=False)
    if path == "explicit":
        explicit(layer)
    allowed = torch.eye(5).bool()
    allowed[2] = False
    x = torch.randn(1, 5, 16)
    keys = token_keys(0, 0, torch.arange(1), torch.arange(5).expand(1, 5))
    out = layer(x, allowed, keys)
    value = x @ layer.query_key_value.weight[32:].t()
    wanted = value @ layer.output.weight.t()
    wanted[:, 2] = 0
    torch.testing.assert_close(out, wanted, **CLOSE)


def test_grouped_queries_share_the_heads_of_keys_and_values() -> None:
    grouped, full = Attention(16, 4, num_key_value_heads=2), Attention(16, 4)
    weight = grouped.query_key_value.weight.detach()
    twice = [weight[:16], *(part.view(2, 4, 16).repeat_interleave(2, 0).flatten(0, 1) for part in (weight[16:24], weight[24:]))]
    with torch.no_grad():
        full.query_key_value.weight.copy_(torch.cat(twice))
        full.output.weight.copy_(grouped.output.weight)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(grouped(x), full(x), **CLOSE)
    torch.testing.assert_close(explicit(grouped)(x), full(x), **CLOSE)


def test_a_cache_gives_what_the_whole_sequence_gives() -> None:
    layer, rotary = Attention(16, 4, num_key_value_heads=2), RotaryEmbedding(4)
    x = torch.randn(2, 6, 16)
    whole = layer(x, build_mask(causal=True, queries=6), rotation=rotary(torch.arange(6)))
    cache, parts = KeyValueCache(), []
    for start, stop in ((0, 3), (3, 5), (5, 6)):
        mask = build_mask(causal=True, queries=stop - start, keys=stop)
        parts.append(layer(x[:, start:stop], mask, cache=cache, rotation=rotary(torch.arange(start, stop))))
    torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)


def test_a_plain_causal_mask_means_the_same_to_both_kernels_when_queries_are_fewer() -> None:
    layer = Attention(16, 4, is_cross_attention=True)
    x, memory = torch.randn(1, 2, 16), torch.randn(1, 5, 16)
    fused = layer(x, Mask(causal=True), memory=memory)
    torch.testing.assert_close(explicit(layer)(x, Mask(causal=True), memory=memory), fused, **CLOSE)
    torch.testing.assert_close(layer(x, build_mask(causal=True, queries=2, keys=5), memory=memory), fused, **CLOSE)


def test_cross_attention_computes_the_memory_once() -> None:
    layer, cache = Attention(16, 4, is_cross_attention=True), KeyValueCache()
    x, memory = torch.randn(1, 2, 16), torch.randn(1, 5, 16)
    first = layer(x, memory=memory, cache=cache)
    assert torch.equal(layer(x, cache=cache), first)
    with pytest.raises(ConfigError, match="needs memory"):
        layer(x)
    with pytest.raises(ConfigError, match="is_cross_attention=True"):
        Attention(16, 4)(x, memory=memory)


@pytest.mark.parametrize("path", ["fused", "explicit"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_is_added_to_the_scores_and_can_be_learned(path: str, causal: bool) -> None:
    layer, relative = Attention(16, 4, scale=1.0), RelativeBias(4, 8, 16)
    if path == "explicit":
        explicit(layer)
    x = torch.randn(2, 5, 16)
    out = layer(x, build_mask(causal=causal, queries=5), bias=relative(5))
    q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in layer.query_key_value(x).chunk(3, -1))
    scores = q @ k.transpose(-1, -2) + relative(5)
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    wanted = layer.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, wanted, **CLOSE)
    out.square().sum().backward()
    assert relative.weight.grad is not None and relative.weight.grad.abs().sum() > 0


def test_the_fused_gradient_is_that_of_the_explicit_product() -> None:
    layer, x = Attention(16, 4), torch.randn(2, 5, 16)
    padding = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
    mask = build_mask(causal=True, queries=5, padding=padding)
    grads = []
    for prepare in (lambda a: a, explicit):
        layer.zero_grad()
        prepare(layer)(x, mask).square().sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_attention_dropout_drops_probabilities_and_scales_the_rest() -> None:
    layer = Attention(16, 4, attention_dropout_prob=0.5, bias=False)
    with torch.no_grad():
        layer.query_key_value.weight[:32] = 0  # equal scores: every probability is 1/8
        layer.query_key_value.weight[32:].copy_(torch.eye(16))
        layer.output.weight.copy_(torch.eye(16))
    out = layer(torch.ones(500, 8, 16), None, token_keys(0, 0, torch.arange(500), torch.arange(8).expand(500, 8)))
    steps = (out * 4).round()  # the output is (number kept) / 8 · 2
    assert torch.allclose(steps / 4, out, atol=1e-6) and steps.min() >= 0 and steps.max() <= 8
    assert abs(float(out.detach().mean()) - 1) < 0.01
    assert len({float(v) for v in out.detach()[0, 0, ::4]}) > 1  # heads differ


def test_sizes_that_do_not_divide_are_errors_that_name_both_numbers() -> None:
    with pytest.raises(LayoutError, match="hidden_size 10 does not divide over 4"):
        Attention(10, 4)
    with pytest.raises(LayoutError, match=r"6 attention heads.*4 key-value heads"):
        Attention(12, 6, num_key_value_heads=4)
    with pytest.raises(LayoutError, match=r"3 attention heads do not divide over tensor_parallel_size=2.*1"):
        Attention(12, 3).check_split(2)


def torch_layer(mine: TransformerLayer, norm_first: bool) -> nn.TransformerEncoderLayer:
    theirs = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=norm_first)
    same_as_torch(mine.attention, theirs.self_attn)
    pairs = (
        (mine.mlp.expand, theirs.linear1), (mine.mlp.contract, theirs.linear2),
        (mine.attention_norm, theirs.norm1), (mine.mlp_norm, theirs.norm2),
    )  # fmt: skip
    with torch.no_grad():
        for a, b in pairs:
            b.weight.add_(torch.randn_like(b.weight) * 0.1)
            a.weight.copy_(b.weight)
            a.bias.copy_(b.bias)
    return theirs


@pytest.mark.parametrize("post_norm", [False, True])
def test_a_transformer_layer_is_torchs(post_norm: bool) -> None:
    mine = TransformerLayer(16, 32, 4, post_norm=post_norm)
    theirs = torch_layer(mine, not post_norm)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("post_norm", [False, True])
def test_a_decoder_layer_attends_to_memory_in_between(post_norm: bool) -> None:
    mine = TransformerLayer(16, 32, 4, post_norm=post_norm, is_decoder=True)
    theirs = nn.TransformerDecoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=not post_norm)
    same_as_torch(mine.attention, theirs.self_attn)
    same_as_torch(mine.cross_attention, theirs.multihead_attn)
    with torch.no_grad():
        for a, b in ((mine.mlp.expand, theirs.linear1), (mine.mlp.contract, theirs.linear2)):
            a.weight.copy_(b.weight)
            a.bias.copy_(b.bias)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    causal = torch.ones(5, 5).triu(1).bool()
    out = mine(x, build_mask(causal=True, queries=5), memory=memory)
    torch.testing.assert_close(out, theirs(x, memory, tgt_mask=causal), rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="is_decoder=True"):
        TransformerLayer(16, 32, 4)(x, memory=memory)


def test_the_branches_of_a_layer_fall_each_by_itself() -> None:
    from dufu.layers.dropout import name_places

    layer = TransformerLayer(16, 32, 4, drop_path_prob=0.5)
    name_places(layer)
    x, keys = torch.randn(200, 1, 16), token_keys(0, 0, torch.arange(200), torch.zeros(200, 1, dtype=torch.long))
    seen = {name: module(x, keys)[:, 0, 0] != 0 for name, module in (("a", layer.attention_drop_path), ("m", layer.mlp_drop_path))}
    both = torch.stack((seen["a"], seen["m"]), -1).long()
    assert torch.unique(both, dim=0).shape[0] == 4  # either, both and none
    out = layer(x, None, keys)
    assert torch.equal(out[~seen["a"] & ~seen["m"]], x[~seen["a"] & ~seen["m"]])


def test_a_stretch_of_keys_has_the_dropout_of_the_whole() -> None:
    from dufu.layers import Dropout

    keys = token_keys(0, 0, torch.arange(2), torch.arange(5).expand(2, 5))
    whole = Dropout(0.4).attention_mask(keys, 3, 4, 21)
    for first, size in ((0, 21), (5, 7), (8, 4), (19, 2)):
        assert torch.equal(Dropout(0.4).attention_mask(keys, 3, 4, size, first), whole[..., first : first + size])
    assert torch.equal(Dropout(0.4).attention_mask(keys, 5, 1, 21), whole[:, 2:3])


@pytest.mark.parametrize("bias", [AlibiBias(4), RelativeBias(4, 8, 16)], ids=["alibi", "relative"])
def test_a_bias_may_be_of_tokens_at_any_places(bias: Any) -> None:
    places = torch.tensor([0, 1, 6, 7])
    assert torch.equal(bias(4, 8, places=places), bias(8)[:, :, places])


@pytest.mark.parametrize("path", ["fused", "explicit"])
def test_attention_within_a_window_is_attention_with_that_mask(path: str) -> None:
    layer = Attention(16, 4, num_key_value_heads=2, attention_dropout_prob=0.3 if path == "explicit" else 0.0, window=3).train()
    keys = token_keys(1, 0, torch.arange(2), torch.arange(7).expand(2, 7))
    x = torch.randn(2, 7, 16)
    near = torch.arange(7)[:, None] - torch.arange(7) < 3
    plain = Attention(16, 4, num_key_value_heads=2, attention_dropout_prob=layer.dropout.p).train()
    plain.load_state_dict(layer.state_dict())
    mask = build_mask(causal=True, queries=7)
    wanted = plain(x, near.tril(), keys)
    torch.testing.assert_close(layer(x, mask, keys), wanted, **CLOSE)
    layer.eval()
    cache, whole = KeyValueCache(), layer(x, mask)
    parts = [layer(x[:, i : i + 1], build_mask(causal=True, queries=1, keys=i + 1), cache=cache) for i in range(7)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)


def test_heads_are_normed_each_by_itself_before_they_are_turned() -> None:
    layer = Attention(16, 2, bias=True, output_bias=False, head_norm=HeadRMSNorm)
    assert layer.output.bias is None and layer.query_key_value.bias is not None
    assert layer.query_norm is not None and layer.key_norm is not None
    with torch.no_grad():
        layer.query_norm.weight.copy_(torch.rand(8))
        layer.key_norm.weight.copy_(torch.rand(8))
    x, rotation = torch.randn(2, 5, 16), RotaryEmbedding(8)(torch.arange(5))
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in layer.query_key_value(x).chunk(3, -1))
    q, k = (functional.rms_norm(t, (8,), w.weight, 1e-6) for t, w in ((q, layer.query_norm), (k, layer.key_norm)))
    out = functional.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v)
    torch.testing.assert_close(layer(x, rotation=rotation), layer.output(out.transpose(1, 2).flatten(2)), **CLOSE)


def test_windows_and_norms_of_heads_are_of_self_attention() -> None:
    with pytest.raises(ConfigError, match="self-attention"):
        Attention(16, 2, is_cross_attention=True, window=3)
    with pytest.raises(ConfigError, match="window of 0 tokens"):
        Attention(16, 2, window=0)
    with pytest.raises(ConfigError, match="branch_norm"):
        TransformerLayer(16, 32, 2, post_norm=True, branch_norm=True)


def test_a_second_norm_is_of_what_a_branch_adds() -> None:
    layer = TransformerLayer(16, 32, 2, branch_norm=True)
    x = torch.randn(2, 5, 16)
    middle = x + functional.layer_norm(layer.attention(functional.layer_norm(x, (16,))), (16,))
    wanted = middle + functional.layer_norm(layer.mlp(functional.layer_norm(middle, (16,))), (16,))
    torch.testing.assert_close(layer(x), wanted, **CLOSE)
