"""What families of decoders add to layers, in other layouts: an update is what it is on one process, dropout on."""

from __future__ import annotations

import os
from typing import Any

import pytest

from dufu.parallel.layout import CONTEXT_METHODS
from tests.parallel import shared_positions
from tests.parallel.shared_positions import distance
from tests.pool import Ranks

UPDATE = 2e-5  # fp32 sums of a few hundred terms in another order, times a gradient of about ten
_GROUPS: dict[str, Any] = {"num_key_value_heads": 2, "tie_word_embeddings": True}
# Of each the layer feature that it stands for.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "norms of heads, windows": ("qwen3", {**_GROUPS, "sliding_window": 4, "max_window_layers": 1, "head_size": 8}),
    "distances": ("bloom", {"ffn_hidden_size": "none of its"}),
    "gated shared experts": (
        "qwen2_moe", {**_GROUPS, "num_experts": 4, "moe_top_k": 2, "moe_ffn_hidden_size": 24, "moe_shared_experts": 1, "moe_z_weight": 0.01},
    ),
    "projections, post-norm": ("opt", {"embedding_size": 16, "post_norm": True}),
    "second norms, half rotated": ("glm4", {**_GROUPS, "head_size": 8}),
    "norms with an offset": ("gemma", {**_GROUPS, "head_size": 8}),
}  # fmt: skip

TENSOR, SEQUENCE = {"tensor": 2}, {"tensor": 2, "sequence": True}
QUICK: list[tuple[str, dict[str, Any]]] = [
    *(("norms of heads, windows", layout) for layout in (TENSOR, SEQUENCE, {"tensor": 2, "pipeline": 2})),
    *(
        (kind, {"context": 2, "context_method": method})
        for kind in ("norms of heads, windows", "distances")
        for method in CONTEXT_METHODS
    ),
    *(("distances", layout) for layout in (TENSOR, {"tensor": 2, "pipeline": 2})),
    ("gated shared experts", SEQUENCE),
    ("projections, post-norm", {"tensor": 2, "pipeline": 2}),
    ("second norms, half rotated", SEQUENCE),
    ("norms with an offset", {"tensor": 2, "pipeline": 2}),
]
ALL: list[tuple[str, dict[str, Any]]] = [
    (kind, layout)
    for kind in DECODERS
    for layout in (
        TENSOR, SEQUENCE, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}, {"data": 2, "zero_stage": 3}, {"zero_stage": 2, "data": 2, **SEQUENCE},
        {"context": 2, **SEQUENCE}, {"context": 2, "pipeline": 2, "context_method": "ring"},
        {"context": 2, "tensor": 2, "context_method": "all_to_all"},
    )
] + [("gated shared experts", {"data": 2, "expert": 2})]  # fmt: skip
# No key-value heads are left to exchange where two processes hold one each.
CASES = [case for case in ALL if case[1].get("context_method") != "all_to_all" or "num_key_value_heads" not in DECODERS[case[0]][1]]
CHOSEN = [*QUICK, *CASES] if os.environ.get("DUFU_MODELS") == "all" else QUICK


def update(kind: str, layout: dict[str, Any], fault: str | None = None) -> dict[str, Any]:
    shared_positions.MODELS.update(DECODERS)
    return shared_positions.one_update(kind, layout, 11, packed=kind == "norms of heads, windows", fault=fault)


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> Any:
    found: dict[str, Any] = {}

    def one(kind: str) -> dict[str, Any]:
        if kind not in found:
            found[kind] = ranks(1, update, kind, {})[0]
        return found[kind]  # type: ignore[no-any-return]

    return one


def size_of(layout: dict[str, Any]) -> int:
    return layout.get("data", 1) * layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1)


def shown(value: Any) -> str:
    return value if isinstance(value, str) else " ".join(f"{k}={v}" for k, v in value.items())


@pytest.mark.parametrize(("kind", "layout"), CHOSEN, ids=shown)
def test_an_update_is_what_it_is_on_one_process(kind: str, layout: dict[str, Any], alone: Any, ranks: Ranks) -> None:
    whole = alone(kind)
    parts = ranks(size_of(layout), update, kind, layout)
    for part in parts:
        assert distance(whole, part) < UPDATE
        for dimension in {"tensor", "context"} & set(layout):
            assert sum(part["sent"][dimension].values()) > 0
        if "pipeline" not in layout:
            assert part["seen"]["stream"][1] == (12 if "context" in layout or "sequence" in layout else 11) // (
                layout.get("context", 1) * (2 if "sequence" in layout else 1)
            )
    if "pipeline" in layout:
        assert len([part for part in parts if part["sums"]]) == len(parts) // 2


@pytest.mark.parametrize(
    ("kind", "layout", "fault"),
    [
        ("norms of heads, windows", TENSOR, "tensor.skip_enter"),
        ("norms of heads, windows", SEQUENCE, "sequence.skip_gradient_sum"),
        ("norms of heads, windows", {"context": 2}, "context.order_of_ranks"),
        ("distances", {"context": 2, "context_method": "ring"}, "context.skip_key_gradient"),
    ],
    ids=shown,
)
def test_a_seeded_fault_turns_it_red(kind: str, layout: dict[str, Any], fault: str, alone: Any, ranks: Ranks) -> None:
    assert max(distance(alone(kind), part) for part in ranks(2, update, kind, layout, fault)) > 10 * UPDATE


def text(kind: str, layout: dict[str, Any], use_cache: bool) -> list[list[int]]:
    import torch

    from dufu.generation.decoding import Decoding, decode

    shared_positions.MODELS.update(DECODERS)
    model = shared_positions.lay_out(kind, layout).model.eval()
    prompts = [[5, 9, 3, 30, 12, 8, 2], [7, 21], [33, 6, 6, 14]]
    return decode(model, prompts, Decoding(max_new_tokens=9, use_cache=use_cache), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["norms of heads, windows", "distances"])
def test_text_of_processes_that_hold_some_heads_each(kind: str, ranks: Ranks) -> None:
    whole = ranks(1, text, kind, {}, True)[0]
    assert whole == ranks(1, text, kind, {}, False)[0]
    for use_cache in (True, False):
        assert ranks(2, text, kind, TENSOR, use_cache) == [whole, whole]
