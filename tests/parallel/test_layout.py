"""A layout is checked before anything starts; each refusal names the numbers and the nearest value that would do."""

from __future__ import annotations

import pytest
import torch

from dufu.compat import storage_identity
from dufu.config.lazy import as_config
from dufu.config.schema import Train, to_dict
from dufu.errors import DufuError, LayoutError
from dufu.layers.linear import Linear
from dufu.models.gpt2 import GPT2
from dufu.parallel.layout import ParallelLayout, check_model, layout_from_config
from dufu.parallel.parameters import Placement, describe
from dufu.parallel.stages import assign_stages


def config(**values: object) -> object:
    train = as_config(to_dict(Train()))
    for key, value in values.items():
        section, _, name = key.partition("__")
        train[section][name] = value
    return train


def test_ranks_count_tensor_parallel_processes_fastest() -> None:
    layout = ParallelLayout(data=2, tensor=2)
    assert layout.groups("tensor") == [[0, 1], [2, 3]] and layout.groups("data") == [[0, 2], [1, 3]]
    layout = ParallelLayout(data=2, tensor=2, pipeline=2, context=2, shard=2, expert=4)
    assert layout.world == 16 and layout.groups("pipeline")[0] == [0, 8]
    assert layout.groups("context")[0] == [0, 2] and layout.groups("data")[0] == [0, 4]
    assert layout.groups("replicas")[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.groups("shard")[:2] == [[0, 2], [4, 6]] and layout.groups("repeat")[:2] == [[0, 4], [2, 6]]
    assert layout.groups("expert")[0] == [0, 2, 4, 6] and layout.groups("expert_replicas")[0] == [0]


def test_data_parallel_takes_what_is_left() -> None:
    assert layout_from_config(config(dist__tensor_parallel_size=2), 8) == ParallelLayout(4, 2)
    zero = layout_from_config(config(zero_optimization__enabled=True, zero_optimization__stage=3), 2)
    assert str(zero) == "zero3" and str(ParallelLayout(2, 2)) == "dp2xtp2"


@pytest.mark.parametrize(
    ("values", "world", "kind", "message"),
    [
        ({"dist__tensor_parallel_size": 3}, 4, LayoutError, "=3 does not divide 4 processes; nearest that does: 2"),
        ({"dist__data_parallel_size": 2, "dist__tensor_parallel_size": 2}, 8, LayoutError, "= 4 processes, but 8 were started"),
        ({"dist__tensor_parallel_size": 0}, 1, LayoutError, "at least 1"),
        ({"zero_optimization__stage": 2}, 2, LayoutError, "enabled=false"),
        ({"dist__pipeline_parallel_size": 3}, 2, LayoutError, "=3 does not divide 2 processes; nearest that does: 2"),
        (
            {"dist__tensor_parallel_size": 2, "dist__context_parallel_size": 3},
            4,
            LayoutError,
            "with tensor 2.*nearest that does: 2",
        ),
        ({"dist__expert_parallel_size": 3}, 4, LayoutError, "does not divide the 4 processes that hold the same part"),
        ({"dist__sequence_parallel": True}, 2, LayoutError, "train.dist.tensor_parallel_size=1; set it to 2"),
        ({"zero_optimization__shard_size": 2}, 2, LayoutError, "enabled=false"),
        ({"zero_optimization__shard_size": 3, "zero_optimization__enabled": True}, 4, LayoutError, "nearest that does: 2"),
        ({"dist__pipeline_parallel_size": 2, "dist__pipeline_virtual_stages": 2}, 2, LayoutError, "1f1b has one stage on each"),
    ],
)
def test_impossible_layouts_are_refused(values: dict[str, object], world: int, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        layout_from_config(config(**values), world)


def test_heads_and_widths_that_do_not_divide_name_the_layer() -> None:
    with torch.device("meta"):
        model = GPT2(vocab_size=101, hidden_layers=1, hidden_size=48, num_attention_heads=3, max_seq_length=8)
        mlp = torch.nn.Sequential(Linear(4, 6, parallel="col"))
    with pytest.raises(LayoutError, match=r"layers.0.block.attention: 3 attention heads do not divide over tensor_parallel_size=2"):
        check_model(model, ParallelLayout(tensor=2))
    with pytest.raises(LayoutError, match=r"0.weight: 6 does not divide over tensor_parallel_size=4; the nearest length is 8"):
        check_model(mlp, ParallelLayout(tensor=4))
    check_model(model, ParallelLayout(tensor=3))  # 101 words are padded, not refused


def test_a_module_that_a_layout_cannot_divide_is_refused() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(LayoutError, match=r"tensor_parallel_size=2 divides layers .* but Sequential has none; set it to 1"):
        check_model(plain, ParallelLayout(tensor=2))
    with pytest.raises(LayoutError, match=r"pipeline_parallel_size=2 divides the layers .* but Sequential has none; set it to 1"):
        assign_stages(plain, {"model": plain}, ParallelLayout(pipeline=2))


def test_two_parameters_on_one_tensor_are_refused_by_name() -> None:
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    model.b.weight = torch.nn.Parameter(model.a.weight.data)
    with pytest.raises(DufuError, match=r"a.weight and b.weight are two parameters on one tensor"):
        describe(model, {"model": model}, Placement())


def test_storage_identity_tells_views_from_copies_on_meta_too() -> None:
    for device in ("cpu", "meta"):
        x = torch.empty(4, device=device)
        assert storage_identity(x) == storage_identity(x[1:]) != storage_identity(x.clone())
