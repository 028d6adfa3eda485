"""Linear, embeddings, norms, feed-forward, patches, head: each alone in plain code, against PyTorch's own or a formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from dufu.errors import ConfigError
from dufu.layers import (
    MLP,
    Conv1D,
    Embedding,
    GatedMLP,
    LayerNorm,
    Linear,
    LMLogits,
    Normal,
    OutputEmbedding,
    PatchEmbedding,
    Pooler,
    RMSNorm,
    VocabEmbedding,
    build_activation,
)  # fmt: skip

EXACT = {"rtol": 0.0, "atol": 1e-6}  # the same arithmetic in another order, on numbers near 1


@pytest.mark.parametrize("parallel", ["data", "col", "row"])
def test_linear_alone_is_torch_linear_whatever_it_says_about_splitting(parallel: str) -> None:
    layer = Linear(6, 4, parallel=parallel)  # type: ignore[arg-type]
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(layer(x), functional.linear(x, layer.weight, layer.bias), **EXACT)
    y, bias = Linear(6, 4, parallel=parallel, skip_bias_add=True)(x)  # type: ignore[arg-type]
    assert y.shape == (2, 3, 4) and bias.shape == (4,)
    assert Linear(6, 4, bias=False, skip_bias_add=True)(x)[1] is None


def test_linear_begins_with_glorots_spread_unless_told_otherwise() -> None:
    torch.manual_seed(0)
    assert float(Linear(300, 200).weight.detach().std()) == pytest.approx((2 / 500) ** 0.5, rel=0.02)
    assert float(Linear(300, 200, init=Normal(0.5)).weight.detach().std()) == pytest.approx(0.5, rel=0.02)
    assert not Linear(3, 2).bias.any()


@pytest.mark.parametrize("kind", [Linear, Conv1D])
def test_an_unknown_way_to_split_is_an_error_that_names_the_known_ones(kind: type[Linear]) -> None:
    with pytest.raises(ConfigError, match=r'parallel="column".*"data", "col", "row"'):
        kind(4, 4, parallel="column")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="add up to 5"):
        kind(4, 4, sections=(2, 3))


@pytest.mark.parametrize("parallel", ["data", "col", "row"])
def test_conv1d_is_linear_with_the_weight_turned_round(parallel: str) -> None:
    layer, plain = Conv1D(6, 4, parallel=parallel), nn.Linear(6, 4)  # type: ignore[arg-type]
    with torch.no_grad():
        layer.weight.copy_(plain.weight.t())
        layer.bias.copy_(plain.bias)
    x = torch.randn(5, 6)
    torch.testing.assert_close(layer(x), plain(x), **EXACT)


@pytest.mark.parametrize("kind", [Embedding, VocabEmbedding])
def test_the_padding_row_is_zero_and_a_look_up_never_trains_it(kind: type[Embedding]) -> None:
    table = kind(5, 3, padding_idx=2)
    ids = torch.tensor([[0, 2, 4], [2, 2, 1]])
    assert not table.weight[2].any() and table.weight[[0, 1, 3, 4]].all()
    rows = table(ids)
    assert torch.equal(rows, table.weight[ids])
    rows.sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad[:, 0].tolist() == [1, 1, 0, 0, 1]


@pytest.mark.parametrize("kind", [Embedding, VocabEmbedding])
def test_embedding_refuses_what_is_no_row(kind: type[Embedding]) -> None:
    with pytest.raises(ConfigError, match=r"padding_idx=5.*0 to 4"):
        kind(5, 3, padding_idx=5)
    for bad in (5, -1):
        with pytest.raises(IndexError):
            kind(5, 3)(torch.tensor([bad]))


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_is_torchs(affine: bool) -> None:
    mine, theirs = LayerNorm(8, 1e-3, elementwise_affine=affine), nn.LayerNorm(8, 1e-3, elementwise_affine=affine)
    x = torch.randn(2, 3, 8)
    assert len(list(mine.parameters())) == (2 if affine else 0)
    torch.testing.assert_close(mine(x), theirs(x), **EXACT)
    assert LayerNorm(8, bias=False).bias is None


def test_rms_norm_is_the_formula_and_exact_enough_in_half_precision() -> None:
    norm = RMSNorm(8, 1e-3)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(2, 8) * 3
    formula = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), formula, **EXACT)
    # bf16 has 8 bits: the result may be off by the rounding of input, weight and output, not by that of the squares' sum
    torch.testing.assert_close(norm.bfloat16()(x.bfloat16()).float(), formula, rtol=2**-6, atol=1e-2)


ACTIVATIONS = {
    "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu": nn.ReLU(), "silu": nn.SiLU(), "tanh": nn.Tanh(),
    "leaky_relu": nn.LeakyReLU(), "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()), "squared_relu": lambda x: x.clamp(min=0) ** 2,
    None: nn.Identity(),
}  # fmt: skip


def test_a_norm_may_train_a_difference_from_one() -> None:
    norm, x = RMSNorm(8, offset=1.0), torch.randn(3, 8)
    assert not norm.weight.any()
    torch.testing.assert_close(norm(x), functional.rms_norm(x, (8,), None, 1e-6), **EXACT)
    with torch.no_grad():
        norm.weight.fill_(0.001)
    # One plus a thousandth is one in bf16; the weight must not be lost.
    half = norm.bfloat16()(x.double().bfloat16() * 100)
    wanted = (1.001 * functional.rms_norm(x.bfloat16().float() * 100, (8,), None, 1e-6)).bfloat16()
    torch.testing.assert_close(half, wanted, rtol=2**-7, atol=0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_formulas(name: str | None) -> None:
    x = torch.linspace(-4, 4, 50)
    torch.testing.assert_close(build_activation(name)(x), ACTIVATIONS[name](x), **EXACT)


def test_an_unknown_activation_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match='did you mean "gelu"'):
        build_activation("gellu")


def test_mlp_and_gated_mlp_are_their_formulas() -> None:
    x = torch.randn(2, 3, 4)
    plain = MLP(4, 8, "gelu")
    hidden = functional.gelu(x @ plain.expand.weight.t() + plain.expand.bias)
    torch.testing.assert_close(plain(x), hidden @ plain.contract.weight.t() + plain.contract.bias, **EXACT)
    gated = GatedMLP(4, 8)
    gate, up = gated.gate_up.weight[:8], gated.gate_up.weight[8:]
    wanted = (functional.silu(x @ gate.t()) * (x @ up.t())) @ gated.contract.weight.t()
    torch.testing.assert_close(gated(x), wanted, **EXACT)
    assert all("bias" not in name for name, _ in gated.named_parameters())


def test_patch_embedding_is_a_product_of_each_patch() -> None:
    layer = PatchEmbedding(img_size=8, patch_size=4, in_chans=2, embed_dim=5)
    images = torch.randn(3, 2, 8, 8)
    out = layer(images)
    assert out.shape == (3, layer.num_patches, 5) and layer.num_patches == 4
    patch = images[:, :, 4:8, 0:4].flatten(1)  # second row of patches, first column: number 2
    torch.testing.assert_close(out[:, 2], patch @ layer.weight.flatten(1).t() + layer.bias, **EXACT)
    normed = PatchEmbedding(8, 4, 2, 5, norm_layer=LayerNorm)(images)
    assert float(normed.detach().mean(-1).abs().max()) < 1e-5
    assert PatchEmbedding(8, 4, 2, 5, flatten=False)(images).shape == (3, 5, 2, 2)


def test_patch_embedding_refuses_pictures_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="224 is not a multiple of patch_size 15; nearest: 225"):
        PatchEmbedding(patch_size=15)
    with pytest.raises(ConfigError, match="8 x 6 pixels; this layer takes 8 x 8"):
        PatchEmbedding(8, 4)(torch.zeros(1, 3, 8, 6))


def test_logits_pooler_and_a_head_of_its_own() -> None:
    table, logits = OutputEmbedding(7, 4), LMLogits(7, bias=True)
    hidden = torch.randn(2, 3, 4)
    scores = logits(hidden, table.weight)
    torch.testing.assert_close(scores, hidden @ table.weight.t() + logits.bias, **EXACT)
    assert torch.equal(logits.whole(scores), scores)
    pooler = Pooler(4)
    wanted = torch.tanh(hidden[:, 0] @ pooler.dense.weight.t() + pooler.dense.bias)
    torch.testing.assert_close(pooler(hidden), wanted, **EXACT)


@pytest.mark.parametrize(
    "make", [lambda: Linear(4, 4), lambda: Embedding(4, 4), lambda: LayerNorm(4), lambda: PatchEmbedding(8, 4)]
)
def test_a_layer_made_on_the_meta_device_draws_nothing(make: object) -> None:
    before = torch.get_rng_state()
    with torch.device("meta"):
        layer = make()  # type: ignore[operator]
    assert all(p.is_meta for p in layer.parameters())
    assert torch.equal(before, torch.get_rng_state())
