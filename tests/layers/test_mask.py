"""One place builds every mask; what it allows is what one would write out by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from dufu.errors import ConfigError
from dufu.layers import Mask, build_mask
from dufu.layers.mask import Held, causal_mask


def rows(mask: Mask, queries: int, keys: int) -> list[str]:
    dense = mask.dense(queries, keys, torch.device("cpu"))
    assert dense is not None
    allowed = dense.expand(1, 1, queries, keys)[0, 0]
    if mask.empty is not None:
        allowed = allowed & ~mask.empty.expand(1, 1, queries, 1)[0, 0]
    return ["".join("x" if a else "." for a in row) for row in allowed.tolist()]


def test_causal_is_aligned_at_the_last_query_and_the_last_key() -> None:
    assert rows(build_mask(causal=True, queries=3), 3, 3) == ["x..", "xx.", "xxx"]
    assert rows(build_mask(causal=True, queries=2, keys=4), 2, 4) == ["xxx.", "xxxx"]
    assert build_mask(causal=True, queries=1, keys=4).dense(1, 4, torch.device("cpu")) is None
    assert rows(build_mask(causal=True, queries=3, keys=2), 3, 2) == ["..", "x.", "xx"]


def test_the_plain_masks_need_no_tensor() -> None:
    assert build_mask(causal=False, queries=5).allowed is None
    plain = build_mask(causal=True, queries=5)
    assert plain.allowed is None and plain.causal and plain.empty is None


@pytest.mark.parametrize(("causal", "pads", "apart"), list(itertools.product([False, True], repeat=3)))
def test_every_combination_allows_what_each_rule_allows(causal: bool, pads: bool, apart: bool) -> None:
    padding = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]) if pads else None
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 2]]) if apart else None
    mask = build_mask(causal=causal, queries=5, padding=padding, documents=documents)
    dense = mask.dense(5, 5, torch.device("cpu"))
    dense = torch.ones(2, 1, 5, 5, dtype=torch.bool) if dense is None else dense.expand(2, 1, 5, 5)
    empty = torch.zeros(2, 1, 5, 1, dtype=torch.bool) if mask.empty is None else mask.empty.expand(2, 1, 5, 1)
    for b, q, k in itertools.product(range(2), range(5), range(5)):
        wanted = (not causal or k <= q) and (padding is None or bool(padding[b, k])) and (
            documents is None or bool(documents[b, q] == documents[b, k])
        )  # fmt: skip
        assert bool(dense[b, 0, q, k] & ~empty[b, 0, q, 0]) == wanted
    assert bool(dense.any(-1).all())


def test_a_mask_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ConfigError, match="padding of an attention mask covers 4 tokens, but there are 5 keys"):
        build_mask(causal=False, queries=5, padding=torch.ones(2, 4))
    with pytest.raises(ConfigError, match="bool"):
        Mask(torch.zeros(3, 3))
    with pytest.raises(ConfigError, match="either"):
        Mask(causal_mask(3, 3), causal=True)


@pytest.mark.parametrize(("causal", "pads", "apart"), list(itertools.product([False, True], repeat=3)))
def test_the_rows_of_held_tokens_are_those_of_the_whole_mask(causal: bool, pads: bool, apart: bool) -> None:
    places = torch.tensor([0, 1, 6, 7])
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]]) if pads else None
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2, 2]]) if apart else None
    device = torch.device("cpu")
    whole = build_mask(causal=causal, queries=8, padding=padding, documents=documents)
    for rows in (places, None):
        mask = build_mask(causal=causal, queries=4, padding=padding, documents=documents, held=Held(places, 8, rows))
        chosen = torch.arange(8) if rows is None else rows
        wanted, found = whole.dense(8, 8, device), mask.dense(len(chosen), 8, device)
        if wanted is None or found is None:
            assert wanted is found is None
            continue
        assert torch.equal(found.expand(2, 1, len(chosen), 8), wanted.expand(2, 1, 8, 8)[:, :, chosen])
        empty = whole.empty, mask.empty
        if empty[0] is not None and empty[1] is not None:
            assert torch.equal(empty[1].expand(2, 1, len(chosen), 1), empty[0].expand(2, 1, 8, 1)[:, :, chosen])
        if rows is not None:
            part = mask.part(slice(2, 4), slice(3, 7))
            assert part is not None and torch.equal(part.expand(2, 1, 2, 4), wanted.expand(2, 1, 8, 8)[:, :, 6:8, 3:7])
    assert mask.looks_back is causal


CPU = torch.device("cpu")


def test_a_window_hides_what_lies_further_back() -> None:
    plain = build_mask(causal=True, queries=4)
    assert rows(plain.near(2, 4, 4, CPU), 4, 4) == ["x...", "xx..", ".xx.", "..xx"]
    assert plain.near(4, 4, 4, CPU) is plain and plain.near(None, 4, 4, CPU) is plain
    # With a cache the queries are the last ones.
    assert rows(build_mask(causal=True, queries=2, keys=5).near(3, 2, 5, CPU), 2, 5) == [".xxx.", "..xxx"]
    assert rows(build_mask(causal=True, queries=1, keys=5).near(3, 1, 5, CPU), 1, 5) == ["..xxx"]


def test_a_window_beside_padding_and_documents() -> None:
    left = build_mask(causal=True, queries=5, padding=torch.tensor([[0, 0, 1, 1, 1]])).near(2, 5, 5, CPU)
    assert rows(left, 5, 5) == [".....", ".....", "..x..", "..xx.", "...xx"]
    # A padding token on the right sees less and less of the real ones, and at last nothing.
    right = build_mask(causal=True, queries=5, padding=torch.tensor([[1, 1, 0, 0, 0]])).near(3, 5, 5, CPU)
    assert rows(right, 5, 5) == ["x....", "xx...", "xx...", ".x...", "....."]
    apart = build_mask(causal=True, queries=5, documents=torch.tensor([[0, 0, 0, 1, 1]])).near(2, 5, 5, CPU)
    assert rows(apart, 5, 5) == ["x....", "xx...", ".xx..", "...x.", "...xx"]


def test_the_window_of_held_tokens_counts_places_of_the_whole_sample() -> None:
    places = torch.tensor([0, 1, 6, 7])
    mask = build_mask(causal=True, queries=4, held=Held(places, 8, places)).near(3, 4, 8, CPU)
    assert mask.looks_back and rows(mask, 4, 8) == ["x.......", "xx......", "....xxx.", ".....xxx"]
    every = build_mask(causal=True, queries=4, held=Held(places, 8, None)).near(3, 4, 8, CPU)
    assert rows(every, 8, 8)[6] == "....xxx."


def test_windows_made_for_all_layers_are_made_once() -> None:
    mask = build_mask(causal=True, queries=6)
    mask.prepare_windows({2, 4}, 6, 6, CPU)
    assert mask.near(2, 6, 6, CPU) is mask.near(2, 6, 6, CPU)
    assert rows(mask.near(4, 6, 6, CPU), 6, 6)[5] == "..xxxx"
