"""Sequence parallelism: the stream between split layers is divided by position, with the numbers of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn

from dufu.errors import LayoutError
from dufu.layers import Dropout, LayerNorm, Linear
from dufu.layers.split import WHOLE
from dufu.models.chain import ChainModel
from dufu.parallel.sequence import SequenceSplit, split_sequence
from dufu.parallel.tensor import split_model
from tests.parallel.shared_positions import MODELS, distance, one_update
from tests.pool import Ranks

# fp32 sums of a few hundred terms in another order: 1e-7 each, and the update multiplies them by a gradient of about ten
CLOSE = 2e-5


@pytest.fixture(scope="module")
def ones(ranks: Ranks) -> Any:
    found: dict[Any, Any] = {}

    def one(kind: str, length: int = 12, packed: bool = False, half: bool = False) -> dict[str, Any]:
        key = (kind, length, packed, half)
        if key not in found:
            found[key] = ranks(1, one_update, kind, {}, length, packed, half)[0]
        return found[key]  # type: ignore[no-any-return]

    return one


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("length", [12, 11])
def test_a_model_is_what_it_is_on_one_process(kind: str, length: int, ones: Any, ranks: Ranks) -> None:
    """Also where 11 positions do not divide over 2 processes."""
    for part in ranks(2, one_update, kind, {"tensor": 2, "sequence": True}, length):
        assert distance(ones(kind, length), part) < CLOSE
        assert part["seen"]["stream"][1] == part["seen"]["branch"][1] == 6
        assert part["sent"]["tensor"]["reduce_scatter"] > 0 and part["sent"]["tensor"]["all_gather"] > 0


def test_what_is_sent_is_the_closed_formula(ranks: Ranks) -> None:
    """Two layers gather and scatter twice each; the embedding scatters and the head gathers. Two micro-batches of two samples."""
    layers, micro_batches, stream = 2, 2, 2 * 12 * 24 * 4
    enters, leaves = 2 * layers, 2 * layers + 1
    for part in ranks(2, one_update, "gpt2", {"tensor": 2, "sequence": True}):
        sent = part["sent"]["tensor"]
        assert sent["all_gather"] == micro_batches * (enters + 1 + leaves) * stream // 2
        assert sent["reduce_scatter"] == micro_batches * (leaves + enters) * stream


def test_on_four_processes(ones: Any, ranks: Ranks) -> None:
    for part in ranks(4, one_update, "gpt2", {"tensor": 4, "sequence": True}, 11):
        assert distance(ones("gpt2", 11), part) < CLOSE and part["seen"]["stream"][1] == 3


@pytest.mark.parametrize("layout", [{"data": 2}, {"data": 2, "zero_stage": 3}, {"pipeline": 2}], ids=["dp2", "zero3", "pp2"])
def test_beside_other_dimensions(layout: dict[str, Any], ones: Any, ranks: Ranks) -> None:
    for part in ranks(4, one_update, "gpt2", {"tensor": 2, "sequence": True, **layout}):
        assert distance(ones("gpt2"), part) < CLOSE


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_with_recomputation(recompute: str, ones: Any, ranks: Ranks) -> None:
    run = functools.partial(one_update, recompute=recompute)
    for part in ranks(2, run, "gpt2", {"tensor": 2, "sequence": True}, 11):
        assert distance(ones("gpt2", 11), part) < CLOSE


def test_with_compiled_units(ones: Any, ranks: Ranks) -> None:
    run = functools.partial(one_update, compile_units=True)
    for part in ranks(2, run, "gpt2", {"tensor": 2, "sequence": True}, 11, timeout=300):
        assert distance(ones("gpt2", 11), part) < CLOSE


def test_under_autocast_half_the_bytes_travel(ones: Any, ranks: Ranks) -> None:
    layout = {"tensor": 2, "sequence": True}
    single = ranks(2, one_update, "gpt2", layout)[0]["sent"]["tensor"]
    for part in ranks(2, one_update, "gpt2", layout, 12, False, True):
        # bf16 rounds to 2^-9, differently in each layout
        assert distance(ones("gpt2", 12, False, True), part) < 0.05
        assert part["sent"]["tensor"]["all_gather"] < 0.8 * single["all_gather"]


@pytest.mark.parametrize(
    "fault", ["sequence.skip_scatter", "sequence.first_stretch", "sequence.skip_gradient_sum", "tensor.skip_enter"]
)
def test_a_seeded_fault_shows(fault: str, ones: Any, ranks: Ranks) -> None:
    for part in ranks(2, one_update, "gpt2", {"tensor": 2, "sequence": True}, 12, False, False, fault):
        assert distance(ones("gpt2"), part) > 100 * CLOSE


def generate(layout: dict[str, Any]) -> list[list[int]]:
    import torch

    from dufu.generation.decoding import Decoding, decode
    from tests.parallel.shared_positions import batches_of, lay_out

    d = lay_out("gpt2", layout)
    d.model.eval()
    with torch.no_grad():
        d.model(batches_of("gpt2", 11, False, 0, 1)[0])  # a scored batch divides positions, and text after it must not
    texts = []
    for cached in (True, False):
        texts += decode(d.model, [[1, 2, 3], [4, 5, 6, 7, 8]], Decoding(max_new_tokens=6, use_cache=cached), torch.device("cpu"))
    return texts


@pytest.mark.parametrize(
    ("size", "layout"),
    [(2, {"tensor": 2, "sequence": True}), (2, {"context": 2}), (4, {"tensor": 2, "sequence": True, "context": 2})],
    ids=["sp2", "cp2", "sp2xcp2"],
)
def test_text_is_generated_whole(size: int, layout: dict[str, Any], ranks: Ranks) -> None:
    whole = ranks(1, generate, {})[0]
    assert all(text == whole for text in ranks(size, generate, layout))


class Chain(ChainModel):
    """Units as they are given."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def units(self) -> dict[str, nn.Module]:
        return dict(self.named_children())


def communicator() -> Any:
    from dufu.parallel.collectives import Communicator

    return Communicator("tensor", None, [0, 1], 0)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(LayoutError, match="Linear is none"):
        split_sequence(nn.Linear(2, 2), {}, communicator())
    alone = Chain(head=nn.Linear(2, 2))
    with pytest.raises(LayoutError, match="Chain has one unit"):
        split_sequence(alone, alone.units(), communicator())
    norm = LayerNorm(4)
    tied = Chain(layer=nn.Sequential(norm), head=nn.Sequential(norm))
    with pytest.raises(LayoutError, match=r"0\.weight of the last unit, head, is shared"):
        split_sequence(tied, tied.units(), communicator())


def test_the_last_unit_keeps_all_positions_and_whole_gradients() -> None:
    model = Chain(
        layer=nn.ModuleDict({"norm": LayerNorm(4), "up": Linear(4, 8, parallel="col"), "down": Linear(8, 4, parallel="row")}),
        head=nn.ModuleDict({"norm": LayerNorm(4), "out": Linear(4, 8, parallel="col"), "dropout": Dropout(0.1)}),
    )
    split_model(model, communicator())
    partial = split_sequence(model, model.units(), communicator())
    names = {name for name, parameter in model.named_parameters() if parameter in partial}
    assert names == {"layer.norm.weight", "layer.norm.bias", "layer.down.bias"}
    parts: Any = dict(model.named_modules())
    assert isinstance(parts["layer.up"].split, SequenceSplit) and not isinstance(parts["head.out"].split, SequenceSplit)
    assert parts["head.dropout"].stream is WHOLE
