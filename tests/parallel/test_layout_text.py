"""Layouts as text: what a text means, that a layout's own text means the layout, and that what is said to be refused is."""

from __future__ import annotations

import pytest

from dufu.errors import DufuError, LayoutError
from dufu.parallel.layout import ParallelLayout, Pipelining, layout_from_config
from dufu.parallel.layout_text import LIMITS, OPTIONS, describe_layouts, parse_layout, parse_layouts
from dufu.parity.recorded_run import ConfigJob, verify_job
from dufu.training.effective import effective_config


def layout_of(text: str) -> ParallelLayout:
    parsed = parse_layout(text)
    # A layout of the config's own plays no part.
    config = effective_config(
        "gpt2_tiny", ["train.dist.tensor_parallel_size=4", "train.zero_optimization.enabled=true", *parsed.overrides]
    )
    return layout_from_config(config.train, parsed.world)


MEANS = {
    "one": ParallelLayout(),
    "dp2": ParallelLayout(data=2),
    "dp2xtp4xpp2": ParallelLayout(data=2, tensor=4, pipeline=2),
    "pp2xdp2": ParallelLayout(data=2, pipeline=2),
    "sp": ParallelLayout(tensor=2, sequence=True),
    "sp4": ParallelLayout(tensor=4, sequence=True),
    "zero3": ParallelLayout(data=2, zero_stage=3),
    "zero1(dp4,shard2)xtp2": ParallelLayout(data=4, tensor=2, zero_stage=1, shard=2),
    "zero2(dp1)xcp2": ParallelLayout(context=2, zero_stage=2),
    "cp2(ring)": ParallelLayout(context=2, context_method="ring"),
    "ep2": ParallelLayout(data=2, expert=2),
    "cp2xep2": ParallelLayout(context=2, expert=2),
    "dp4xep2": ParallelLayout(data=4, expert=2),
    "pp2(zbv)": ParallelLayout(pipeline=2, pipelining=Pipelining("zbv", 2)),
    "pp2(looped_bfs,virtual3)": ParallelLayout(pipeline=2, pipelining=Pipelining("looped_bfs", 3)),
}


@pytest.mark.parametrize("text", MEANS)
def test_a_text_means_a_layout(text: str) -> None:
    assert layout_of(text) == MEANS[text] and parse_layout(text).world == MEANS[text].world


@pytest.mark.parametrize("text", [t for t in MEANS if "virtual3" not in t and "ring" not in t])
def test_a_layout_writes_a_text_that_means_it(text: str) -> None:
    assert layout_of(str(MEANS[text])) == MEANS[text]


def test_options_follow_a_colon() -> None:
    found = parse_layout("tp2xpp2:recompute+O1+accum4+optim.lr=1e-3")
    assert found.world == 4
    assert found.options == (
        *OPTIONS["recompute"], *OPTIONS["O1"], "train.num_accumulation_steps=4", "train.train_micro_batch_size=null", "optim.lr=1e-3",
    )  # fmt: skip
    assert [x.text for x in parse_layouts("dp2, zero3(dp4,shard2) ,pp2(looped_bfs,virtual2)")] == [
        "dp2", "zero3(dp4,shard2)", "pp2(looped_bfs,virtual2)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp2", 'did you mean "tp2"'),
        ("dq4", 'did you mean "dp4"'),
        ("data2", "factors, joined by x: dpN"),
        ("tp", '"tp" needs a number of processes from 2, such as tp2'),
        ("dp1", "a number of processes from 2"),
        ("zero", "a stage, such as zero1"),
        ("zero4", "nearest: zero3"),
        ("zero3(dp4,shrd2)", "zeroS takes dpN and shardM"),
        ("tp2(ring)", "takes nothing in parentheses"),
        ("pp2(zvb)", 'did you mean "zbv"'),
        ("cp2(rng)", 'did you mean "ring"'),
        ("tp2xtp2", "tp stands there twice"),
        ("tp2:recompte", 'did you mean "recompute"'),
        ("tp2:", "no option is called"),
        ("", "is no factor"),
    ],
)
def test_what_is_no_layout_is_refused_with_the_nearest(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message.replace("(", r"\(")):
        parse_layout(text)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.example)
def test_what_is_said_to_be_refused_is_refused(limit: object) -> None:
    found = next(x for x in LIMITS if x is limit)
    with pytest.raises(DufuError):
        parsed = parse_layout(found.example)
        verify_job(ConfigJob(found.recipe, tuple(parsed.overrides), (), 1), parsed.world)


def test_the_description_holds_every_table() -> None:
    grammar, options, limits = describe_layouts().values()
    assert len(grammar) == 7 and {name for name, _ in options} >= set(OPTIONS) and len(limits) == len(LIMITS)


@pytest.mark.parametrize(
    "text",
    [
        "dp2xtp2",
        "zero3",
        "zero1(dp4)",
        "zero3(dp4,shard2)",
        "sp2xpp2(zbv)",
        "pp2(looped_bfs,virtual3)",
        "cp2(ring)xep2",
        "zero2(dp1)xcp2",
    ],
)
def test_a_layout_is_written_as_it_is_read(text: str) -> None:
    from dufu.config.lazy import as_config
    from dufu.config.overrides import apply_overrides
    from dufu.config.schema import Train, to_dict
    from dufu.parallel.layout import layout_from_config

    parsed = parse_layout(text)
    config = as_config({"train": to_dict(Train())})
    apply_overrides(config, list(parsed.overrides))
    assert str(layout_from_config(config.train, parsed.world)) == text
