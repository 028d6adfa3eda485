"""Sequence parallelism: the stream between split layers is divided by position, with the numbers of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest

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
