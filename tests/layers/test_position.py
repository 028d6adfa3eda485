"""Positions: added, rotated, or as a bias; each against its published formula."""

from __future__ import annotations

import math

import pytest
import torch

from dufu.errors import ConfigError, LayoutError, NotBuiltError
from dufu.layers import (
    AlibiBias,
    LearnedPositionalEmbedding,
    Llama3Scaling,
    RelativeBias,
    RotaryEmbedding,
    SinePositionalEmbedding,
    rotate,
)  # fmt: skip
from dufu.layers.bias import alibi_slopes, relative_buckets
from dufu.layers.rotary import YarnScaling, build_scaling


def test_sine_positions_are_the_papers_and_there_is_nothing_to_train() -> None:
    table = SinePositionalEmbedding(100, 8)
    positions = torch.tensor([[0, 1, 50], [99, 3, 3]])
    rows = table(positions)
    for b, t, i in ((0, 1, 0), (0, 2, 3), (1, 0, 2)):
        angle = float(positions[b, t]) / 10000 ** (2 * i / 8)
        assert rows[b, t, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert rows[b, t, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert not table.state_dict() and not list(table.parameters())
    with pytest.raises(ConfigError, match="embedding_dim=7"):
        SinePositionalEmbedding(4, 7)


@pytest.mark.parametrize("kind", [SinePositionalEmbedding, LearnedPositionalEmbedding])
def test_more_tokens_than_positions_is_an_error_that_names_both(kind: type) -> None:
    with pytest.raises(LayoutError, match="5 tokens do not fit into max_seq_length=4"):
        kind(4, 8)(torch.arange(5))


def test_learned_positions_may_begin_some_rows_later() -> None:
    table = LearnedPositionalEmbedding(4, 8, offset=2, padding_idx=1)
    assert table.weight.shape == (6, 8) and not table.weight[1].any()
    assert torch.equal(table(torch.arange(4)), table.weight[2:])
    with pytest.raises(LayoutError, match="5 tokens do not fit into max_seq_length=4"):
        table(torch.arange(5))


def test_rotary_turns_each_pair_by_its_angle_and_scores_depend_on_distance_only() -> None:
    torch.manual_seed(0)
    rotary = RotaryEmbedding(8, base=100.0)
    x = torch.randn(1, 1, 1, 8)
    turned = rotate(x, rotary(torch.tensor([[5]])))
    for i in range(4):
        angle = 5 * 100.0 ** (-2 * i / 8)
        pair = complex(x[..., i], x[..., i + 4]) * complex(math.cos(angle), math.sin(angle))
        assert complex(turned[..., i], turned[..., i + 4]) == pytest.approx(pair, abs=1e-6)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    scores = [
        float((rotate(q, rotary(torch.tensor([[m]]))) * rotate(k, rotary(torch.tensor([[n]])))).sum())
        for m, n in ((7, 3), (104, 100))
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)  # float32 cosines of angles up to 100


def test_rotary_may_leave_features_alone_and_keeps_the_type() -> None:
    x = torch.randn(2, 3, 4, 10, dtype=torch.bfloat16)
    turned = rotate(x, RotaryEmbedding(6)(torch.arange(4)))
    assert turned.dtype == torch.bfloat16 and torch.equal(turned[..., 6:], x[..., 6:])
    assert torch.equal(turned[:, :, 0], x[:, :, 0])  # position 0
    with pytest.raises(ConfigError, match="rotary_size=5"):
        RotaryEmbedding(5)


def test_rotary_angles_are_not_rounded_by_a_cast_of_the_model() -> None:
    """B115: position 4095, off by less than a hundredth of a radian, in a model cast to bf16."""
    rotary = RotaryEmbedding(64).bfloat16()
    cos, sin = rotary(torch.tensor([4095]))
    angles = [4095 * 10000.0 ** (-2 * i / 64) for i in range(32)]
    found = torch.atan2(sin, cos).flatten().double()
    off = (found - torch.tensor(angles, dtype=torch.float64) + math.pi) % (2 * math.pi) - math.pi
    assert float(off.abs().max()) < 1e-5


def test_llama3_scaling_keeps_fast_frequencies_divides_slow_ones_and_mixes_between() -> None:
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    turn = 2 * math.pi / 8192
    assert scaling(5 * turn) == pytest.approx(5 * turn) and scaling(0.5 * turn) == pytest.approx(0.5 * turn / 8)
    middle = 2.5 * turn  # half way between 1 and 4 turns
    assert scaling(middle) == pytest.approx(middle * (0.5 + 0.5 / 8))
    assert RotaryEmbedding(8, 500000.0, scaling).frequencies[0] == 1.0


def test_yarn_keeps_fast_frequencies_divides_slow_ones_and_lengthens_keys_and_queries() -> None:
    rotary = RotaryEmbedding(64, 10000.0, YarnScaling(4.0, 4096))
    plain = RotaryEmbedding(64, 10000.0)
    assert rotary.frequencies[0] == plain.frequencies[0]
    assert rotary.frequencies[31] == pytest.approx(plain.frequencies[31] / 4)
    # Pair i turns 4096 · f / 2π times: 32 turns at pair 10.4, one turn at pair 22.5; the ramp is from 10 to 23.
    for pair, share in ((10, 0.0), (11, 1 / 13), (17, 7 / 13), (23, 1.0)):
        assert rotary.frequencies[pair] == pytest.approx(plain.frequencies[pair] * (1 - share * 0.75))
    cos, sin = rotary(torch.arange(3))
    assert torch.allclose(cos.square() + sin.square(), torch.tensor((0.1 * math.log(4.0) + 1) ** 2))


def test_a_scaling_is_described_by_its_kind_and_numbers() -> None:
    assert build_scaling(None) is None
    assert build_scaling({"factor": 4.0}) == Llama3Scaling(4.0)
    linear = build_scaling({"kind": "linear", "factor": 4.0})
    assert linear is not None and linear.change([1.0, 0.5], 10.0) == [0.25, 0.125]
    with pytest.raises(NotBuiltError, match="dynamic"):
        build_scaling({"kind": "dynamic", "factor": 2.0})
    with pytest.raises(ConfigError, match=r"kind=.yarm.*yarn"):
        build_scaling({"kind": "yarm"})
    with pytest.raises(ConfigError, match="for kind yarn the keys are factor, original_length"):
        build_scaling({"kind": "yarn", "faktor": 2.0})


def test_alibi_slopes_are_the_papers() -> None:
    assert alibi_slopes(8) == pytest.approx([2.0**-i for i in range(1, 9)])
    assert alibi_slopes(2) == pytest.approx([1 / 16, 1 / 256])
    # six heads: the four of a layer of four, then the first and third of a layer of eight
    assert alibi_slopes(6) == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    bias = AlibiBias(8)(2, 4)
    assert bias.shape == (1, 8, 2, 4)
    assert bias[0, 0].tolist() == [[-1.0, -0.5, 0.0, -0.5], [-1.5, -1.0, -0.5, 0.0]]


def test_relative_buckets_are_those_of_t5() -> None:
    """Distances at which T5's published function (32 buckets, 128) changes bucket: 8, 12, 16, 23, 32, 46, 64, 91."""
    away = torch.arange(200)
    both = relative_buckets(-away, 32, 128, True)
    assert both[:8].tolist() == list(range(8))
    changes = [i for i in range(8, 200) if both[i] != both[i - 1]]
    assert changes == [8, 12, 16, 23, 32, 46, 64, 91] and both[-1] == 15
    assert torch.equal(relative_buckets(away, 32, 128, True)[1:], both[1:] + 16)
    causal = relative_buckets(-away, 32, 128, False)
    assert causal[:16].tolist() == list(range(16)) and causal.max() == 31 and causal[127] == 31
    assert not relative_buckets(away, 32, 128, False).any()


def test_relative_bias_looks_up_its_buckets_and_a_later_query_sees_the_same_distances() -> None:
    bias = RelativeBias(3, num_buckets=8, max_distance=16)
    whole = bias(6)
    assert whole.shape == (1, 3, 6, 6)
    buckets = relative_buckets(torch.tensor(4 - 1), 8, 16, True)
    assert torch.equal(whole[0, :, 1, 4], bias.weight[buckets])
    assert torch.equal(bias(1, 6), whole[:, :, -1:])
