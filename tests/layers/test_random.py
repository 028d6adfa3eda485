"""The random numbers are sound, the same for every slice, and never change."""

from __future__ import annotations

import math

import pytest
import torch

from dufu.errors import ConfigError
from dufu.layers.dropout import Dropout, DropPath, name_places
from dufu.layers.initial import Normal, ZeroRow
from dufu.layers.random import derive, keep_mask, normal_block, stable_hash, token_keys, uniform, words

SAMPLES, TOKENS, FEATURES = 64, 64, 64


def keys(seed: int = 1, step: int = 0, samples: int = SAMPLES, tokens: int = TOKENS) -> torch.Tensor:
    return token_keys(seed, step, torch.arange(samples), torch.arange(tokens).expand(samples, tokens))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten().double(), b.flatten().double())))[0, 1])


def test_the_stream_never_changes() -> None:
    """Values written down once: a change here would change every run's weights and masks without a word."""
    assert stable_hash("dropout", 1234) == 1074575763090036283
    assert words(torch.tensor([7]), 0, 3).tolist() == [[1346066266802458481, -7565168462085734205, -8409650730693102460]]
    assert token_keys(1234, 5, torch.tensor([0, 9]), torch.tensor([[0, 1], [0, 1]])).tolist() == [
        [-2277223749171089151, 1729050436171942040],
        [6369415187287961819, 4087956922371739237],
    ]
    weights = torch.tensor(
        [
            [-0.29562678933143616, 0.05613045021891594, 0.41121289134025574],
            [1.9537750482559204, 0.4563145637512207, 0.20776128768920898],
        ]
    )
    # the last bit may go either way where another machine's cosine rounds otherwise
    assert torch.allclose(normal_block(1234, "layers.0.weight", 3, 2, 5, 3), weights, rtol=2e-7, atol=0)
    assert keep_mask(torch.tensor([7]), 12, 0.5).int().tolist() == [[0, 1, 1, 1, 1, 0, 1, 0, 0, 1, 0, 0]]


def test_words_are_those_of_the_formula_in_plain_integers() -> None:
    def signed(value: int) -> int:
        value %= 2**64
        return value - 2**64 if value >= 2**63 else value

    def mix(x: int) -> int:
        x = signed(x)
        x = signed((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9)
        x = signed((x ^ (x >> 27)) * 0x94D049BB133111EB)
        return signed(x ^ (x % 2**64 >> 32))

    for key in (0, 7, -3, 2**63 - 1):
        assert words(torch.tensor(key), 2, 4).tolist() == [mix(key + i * 0x9E3779B97F4A7C15) for i in range(2, 6)]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_a_mask_drops_the_right_share_everywhere(p: float) -> None:
    mask = keep_mask(derive(keys(), 5), FEATURES, p).double()
    assert abs(mask.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / mask.numel())
    for rest in ((1, 2), (0, 2), (0, 1)):  # of every sample, token and feature, hence in each of the four lanes of a word
        shares = mask.mean(rest)
        assert float((shares - (1 - p)).abs().max()) < 5 * math.sqrt(p * (1 - p) * shares.numel() / mask.numel())


def test_neighbours_of_every_kind_are_uncorrelated() -> None:
    mask = keep_mask(derive(keys(), 5), FEATURES, 0.5)
    limit = 5 / math.sqrt(mask.numel())
    others = {
        "feature": (mask[..., 1:], mask[..., :-1]),
        "word": (mask[..., 4:], mask[..., :-4]),
        "token": (mask[:, 1:], mask[:, :-1]),
        "sample": (mask[1:], mask[:-1]),
        "diagonal": (mask[1:, :-1], mask[:-1, 1:]),
        "place": (mask, keep_mask(derive(keys(), 6), FEATURES, 0.5)),
        "step": (mask, keep_mask(derive(keys(step=1), 5), FEATURES, 0.5)),
        "seed": (mask, keep_mask(derive(keys(seed=2), 5), FEATURES, 0.5)),
    }
    for name, (a, b) in others.items():
        assert abs(correlation(a, b)) < limit, name


def test_each_of_seed_step_sample_and_position_changes_the_key() -> None:
    first = token_keys(1, 0, torch.tensor([0]), torch.tensor([[0]])).item()
    for seed, step, sample, position in ((2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1)):
        assert token_keys(seed, step, torch.tensor([sample]), torch.tensor([[position]])).item() != first


def test_normal_deviates_are_normal_and_independent() -> None:
    block = normal_block(1, "weight", 0, 512, 0, 512).double()
    n = block.numel()
    assert abs(block.mean()) < 5 / math.sqrt(n) and abs(block.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((block**3).mean()) < 5 * math.sqrt(15 / n) and abs((block**4).mean() - 3) < 5 * math.sqrt(96 / n)
    for a, b in ((block[:, 1:], block[:, :-1]), (block[1:], block[:-1]), (block, normal_block(1, "other", 0, 512, 0, 512))):
        assert abs(correlation(a, b)) < 5 / math.sqrt(n)
        assert abs(correlation(a.abs(), b.abs())) < 5 / math.sqrt(n)
    inside = (block.abs() < 1).double().mean()
    assert abs(inside - math.erf(1 / math.sqrt(2))) < 5 * math.sqrt(0.25 / n)


def test_a_uniform_number_for_each_key_lies_evenly_in_the_open_interval() -> None:
    numbers = uniform(torch.arange(100_000))
    assert 0 < float(numbers.min()) < 1e-3 and 1 - 1e-3 < float(numbers.max()) < 1
    assert torch.histc(numbers, 10, 0, 1).sub(10_000).abs().max() < 5 * math.sqrt(10_000)


@pytest.mark.parametrize(("row", "rows", "col", "cols"), [(0, 4, 0, 9), (3, 2, 1, 4), (7, 1, 8, 1), (2, 5, 3, 6), (0, 8, 5, 2)])
def test_a_rectangle_of_weights_equals_its_part_of_the_whole(row: int, rows: int, col: int, cols: int) -> None:
    whole = normal_block(3, "w", 0, 8, 0, 9)
    assert torch.equal(normal_block(3, "w", row, rows, col, cols), whole[row : row + rows, col : col + cols])


def test_a_large_tensor_filled_in_chunks_equals_one_block() -> None:
    whole = torch.empty(1100, 1024)  # more than one chunk
    Normal(2.0).fill(whole, 3, "w", 0, 0)
    part = torch.empty(40, 5)
    Normal(2.0).fill(part, 3, "w", 1040, 7)
    assert torch.equal(part, whole[1040:1080, 7:12])


def test_the_padding_row_is_zero_in_whichever_part_it_lies() -> None:
    rule = ZeroRow(Normal(1.0), 5)
    for first in (0, 4, 5, 6):
        part = torch.empty(2, 3)
        rule.fill(part, 1, "w", first, 0)
        zero = (part == 0).all(1).tolist()
        assert zero == [first == 5, first + 1 == 5]


@pytest.mark.parametrize(("first", "size"), [(0, 8), (4, 4), (3, 6), (1, 1), (7, 9)])
def test_a_slice_of_features_sees_its_part_of_the_whole_mask(first: int, size: int) -> None:
    some = keys(samples=2, tokens=3)
    assert torch.equal(keep_mask(some, size, 0.5, first), keep_mask(some, 16, 0.5)[..., first : first + size])


def test_a_slice_of_heads_sees_its_part_of_the_whole_mask() -> None:
    drop = Dropout(0.5)
    probs = torch.rand(2, 8, 5, 5)
    some = keys(samples=2, tokens=5)
    assert torch.equal(drop.attention(probs[:, 4:], some, 4), drop.attention(probs, some, 0)[:, 4:])


def test_a_mask_does_not_depend_on_order_or_size_of_the_batch_nor_on_padding() -> None:
    drop = Dropout(0.3)
    numbers, places = torch.tensor([11, 4, 7]), torch.arange(6).expand(3, 6)
    x = torch.ones(3, 6, 10)
    whole = drop(x, token_keys(1, 2, numbers, places))
    order = [2, 0, 1]
    assert torch.equal(drop(x, token_keys(1, 2, numbers[order], places)), whole[order])
    for row in range(3):
        assert torch.equal(drop(x[:1], token_keys(1, 2, numbers[row : row + 1], places[:1])), whole[row : row + 1])
    longer = token_keys(1, 2, numbers, torch.arange(9).expand(3, 9))
    assert torch.equal(drop(torch.ones(3, 9, 10), longer)[:, :6], whole)
    probs = torch.ones(3, 2, 9, 9)
    assert torch.equal(drop.attention(probs, longer, 0)[:, :, :6, :6], drop.attention(probs[..., :6, :6], longer[:, :6], 0))


def test_each_place_of_a_model_has_a_mask_of_its_own() -> None:
    model = torch.nn.ModuleList([Dropout(0.5), Dropout(0.5), DropPath(0.5)])
    name_places(model)
    x, some = torch.ones(4, 8, 16), keys(samples=4, tokens=8)
    assert not torch.equal(model[0](x, some), model[1](x, some))
    assert len({int(drop.place) for drop in model}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_the_expectation_and_scales_gradients_as_values(dtype: torch.dtype) -> None:
    x = torch.ones(64, 64, 64, dtype=dtype, requires_grad=True)
    y = Dropout(0.1)(x, keys())
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())  # of ones
    # 5 standard deviations; bf16 rounds 1/0.9 by up to 2^-8 relative
    assert abs(y.detach().double().mean() - 1) < 5 * math.sqrt(0.1 / 0.9 / x.numel()) + (2**-8 if dtype == torch.bfloat16 else 0)


def test_drop_path_drops_whole_samples_and_only_in_training() -> None:
    path = DropPath(0.25)
    x, some = torch.ones(4000, 2, 3), keys(samples=4000, tokens=2)
    y = path(x, some)
    kept = y[:, 0, 0] != 0
    assert torch.equal(y, kept.view(-1, 1, 1) * x / 0.75)
    assert abs(kept.double().mean() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / 4000)
    assert torch.equal(path.eval()(x, some), x)


@pytest.mark.parametrize("p", [-0.1, 1.0, 0.9999999, float("nan")])
@pytest.mark.parametrize("kind", [Dropout, DropPath])
def test_a_probability_that_cannot_be_is_an_error(kind: type, p: float) -> None:
    with pytest.raises(ConfigError, match="probability"):
        kind(p)
