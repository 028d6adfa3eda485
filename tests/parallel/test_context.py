"""Several processes share the positions of every sample: attention reaches all keys in three ways, each with the numbers of one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dufu.compat import attention_block, attention_block_backward
from dufu.errors import ConfigError, LayoutError, NotBuiltError
from dufu.layers import (
    AlibiBias,
    Attention,
    DropPath,
    Embedding,
    LearnedPositionalEmbedding,
    Mask,
    RelativeBias,
    RotaryEmbedding,
    TransformerLayer,
    build_mask,
)  # fmt: skip
from dufu.layers.initial import Normal
from dufu.layers.random import token_keys
from dufu.models.chain import Batch, ChainModel
from dufu.parallel import faults, ring
from dufu.parallel.context import attention_bytes, split_context
from dufu.parallel.layout import CONTEXT_METHODS, ParallelLayout
from dufu.parallel.process import choose_device, join, world_size
from dufu.parallel.view import places_of
from tests.pool import Ranks

HEADS, HEAD = 12, 4


class Look(nn.Module):
    """Numbers of a token, the same wherever it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(64, 24, init=Normal(0.7))

    def forward(self, state: None, batch: Batch) -> Tensor:
        x: Tensor = self.table(batch.input_ids)
        return x


class Attend(nn.Module):
    def __init__(self, kv_heads: int, dropout: float, bias: str, cross: int, rotary: bool) -> None:
        super().__init__()
        wide = Normal(0.3)
        self.layer = Attention(24, HEADS, kv_heads, HEAD, cross > 0, dropout, init=wide)
        self.bias = {"": None, "alibi": AlibiBias(HEADS), "relative": RelativeBias(HEADS, 8, 16, init=Normal(0.5))}[bias]
        self.rotary = RotaryEmbedding(HEAD) if rotary else None
        self.cross = cross
        self.memory = Embedding(64, 24, init=Normal(0.7)) if cross else None

    def forward(self, state: Tensor, batch: Batch) -> Tensor:
        places = None if batch.held is None else batch.held.rows
        given: dict[str, Any] = {"mask": batch.mask, "keys": batch.keys}
        if self.bias is not None:
            given["bias"] = self.bias(batch.length, batch.length, places=places)
        if self.rotary is not None:
            given["rotation"] = self.rotary(batch.positions)
        if self.memory is not None:
            # The other sequence's end is padding, and every query sees all the rest.
            ids, padding = torch.arange(self.cross).expand(3, -1) % 64, torch.arange(self.cross).expand(3, -1) < self.cross - 2
            given["mask"] = build_mask(causal=False, queries=state.shape[1], keys=self.cross, padding=padding, held=batch.held)
            if batch.held is not None:
                size = batch.held.total // state.shape[1]
                rank = int(batch.held.places[0]) * 2 // state.shape[1]
                ids = ids[:, places_of(rank, size, self.cross)]
            given["memory"] = self.memory(ids)
        out: Tensor = self.layer(state, **given)
        return out


class Probe(ChainModel):
    """A table, an attention layer, and the layer's output as it is."""

    def __init__(
        self, causal: bool, kv_heads: int = HEADS, dropout: float = 0.0, bias: str = "", cross: int = 0, rotary: bool = False
    ) -> None:
        super().__init__()
        self.causal = causal
        self.look, self.attend = Look(), Attend(kv_heads, dropout, bias, cross, rotary)
        self.finish()

    def units(self) -> dict[str, nn.Module]:
        return {"look": self.look, "attend": self.attend}


# name → the model, the length of the samples, and which rules the mask has
CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "all": ({"causal": False}, 12, ""),
    "all, of a length that does not divide": ({"causal": False}, 10, ""),
    "causal": ({"causal": True}, 12, ""),
    "causal, of a length that does not divide": ({"causal": True, "rotary": True}, 11, ""),
    "causal, shorter than the processes": ({"causal": True}, 1, ""),
    "dropout": ({"causal": False, "dropout": 0.3}, 12, ""),
    "causal dropout": ({"causal": True, "dropout": 0.3}, 11, ""),
    "padding": ({"causal": False}, 12, "padding"),
    "causal padding, dropout": ({"causal": True, "dropout": 0.2}, 12, "padding"),
    "documents": ({"causal": True, "dropout": 0.2}, 13, "documents"),
    "documents, both ways": ({"causal": False}, 11, "documents"),
    "everything hidden": ({"causal": True, "dropout": 0.2}, 11, "padding documents"),
    "grouped": ({"causal": True, "kv_heads": 6}, 12, ""),
    "grouped, dropout, rotary": ({"causal": False, "kv_heads": 6, "dropout": 0.2, "rotary": True}, 12, "padding"),
    "alibi": ({"causal": True, "bias": "alibi", "dropout": 0.1}, 12, ""),
    "relative": ({"causal": False, "bias": "relative"}, 11, "padding"),
    "relative, causal": ({"causal": True, "bias": "relative", "dropout": 0.1}, 12, "padding"),
    "cross": ({"causal": True, "cross": 12, "dropout": 0.2}, 11, ""),
    "cross, longer": ({"causal": True, "cross": 24, "kv_heads": 6}, 11, ""),
}  # fmt: skip


def batch_of(length: int, rules: str) -> Batch:
    """Three samples: whole, padded on the left, and nothing but padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (3, length), generator=generator)
    padding = documents = None
    if "padding" in rules:
        padding = torch.arange(length) >= torch.tensor([0, 4, length])[:, None]
    if "documents" in rules:
        documents = torch.arange(length) // torch.tensor([3, 5, 100])[:, None]
    keys = token_keys(1, 2, torch.arange(3), torch.arange(length).expand(3, length))
    return Batch(ids, ids.clone(), keys=keys, padding=padding, documents=documents)


def measure(name: str, method: str = "all_gather", fault: str | None = None, scores: int = ring.MOST_SCORES) -> dict[str, Any]:
    """Return the output at this process's places, the gradients summed over all, and what was sent."""
    ring.MOST_SCORES = scores
    arguments, length, rules = CASES[name]
    processes = join(ParallelLayout(context=world_size(), context_method=method), choose_device("cpu"))
    torch.manual_seed(0)
    model = Probe(**arguments)
    split_context(model, processes.context, method)
    batch = batch_of(length, rules)
    with faults.inject(fault) if fault else nullcontext():
        out = model(batch)
        seen = model.view(batch)
        places = torch.arange(length) if seen.places is None else seen.places
        real = places < length
        weights = torch.randn(3, length, 24, generator=torch.Generator().manual_seed(4))[:, places[real]]
        forward = dict(processes.context.sent)
        (out[:, real] * weights).sum().backward()
    backward = {k: v - forward.get(k, 0) for k, v in processes.context.sent.items()}
    grads = {}
    for key, parameter in model.named_parameters():
        grads[key] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        processes.context.sum_(grads[key])
    return {
        "places": places[real], "out": out.detach()[:, real], "grads": grads, "held": seen.input_ids.shape[1],
        "sent": (forward, {k: v for k, v in backward.items() if v}),
    }  # fmt: skip


def same(one: dict[str, Any], parts: list[dict[str, Any]]) -> bool:
    """fp32 sums of a few dozen terms in another order, of numbers up to about ten."""
    whole = torch.empty_like(one["out"])
    for part in parts:
        whole[:, part["places"]] = part["out"]
    assert sorted(torch.cat([p["places"] for p in parts]).tolist()) == list(range(one["out"].shape[1]))
    return torch.allclose(whole, one["out"], rtol=1e-5, atol=1e-5) and all(
        torch.allclose(part["grads"][key], grad, rtol=1e-4, atol=2e-5) for part in parts for key, grad in one["grads"].items()
    )


@pytest.fixture(scope="module")
def ones(ranks: Ranks) -> dict[str, dict[str, Any]]:
    return {name: ranks(1, measure, name)[0] for name in CASES}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("method", CONTEXT_METHODS)
@pytest.mark.parametrize("name", CASES)
def test_each_method_gives_what_one_process_gives(name: str, method: str, size: int, ones: Any, ranks: Ranks) -> None:
    parts = ranks(size, measure, name, method)
    assert same(ones[name], parts)
    for part in parts:
        assert bool(part["out"].isfinite().all()) and all(bool(g.isfinite().all()) for g in part["grads"].values())
        assert part["held"] == -(-CASES[name][1] // (2 * size)) * 2


@pytest.mark.parametrize("name", ["causal dropout", "causal padding, dropout", "relative, causal", "cross, longer"])
def test_a_ring_may_score_a_few_queries_at_a_time(name: str, ones: Any, ranks: Ranks) -> None:
    """One query at a time, or two of the three or six of a process."""
    for scores in (1, 2 * 3 * HEADS * 3):
        assert same(ones[name], ranks(2, measure, name, "ring", None, scores))


def test_a_query_with_nothing_to_attend_to_gives_zero(ones: Any, ranks: Ranks) -> None:
    """B110, in every method: the output is then the projection's bias, which begins as zero."""
    for method in CONTEXT_METHODS:
        for part in ranks(2, measure, "everything hidden", method):
            assert not part["out"][2].any() and not part["out"][1][part["places"] < 4].any()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_what_is_sent_is_the_closed_formula(method: str, size: int, ranks: Ranks) -> None:
    for part in ranks(size, measure, "grouped", method):
        sizes: dict[str, Any] = {
            "batch": 3, "heads": HEADS, "kv_heads": 6, "length": 12 // size, "head_size": HEAD, "itemsize": 4
        }  # fmt: skip
        assert part["sent"][0] == attention_bytes(method, size, **sizes)
        assert part["sent"][1] == attention_bytes(method, size, **sizes, backward=True)


@pytest.mark.parametrize(
    ("name", "method", "fault"),
    [
        ("dropout", "all_gather", "context.dropout_by_rank"),
        ("dropout", "ring", "context.dropout_by_rank"),
        ("causal, of a length that does not divide", "all_to_all", "context.shifted_positions"),
        ("causal", "all_gather", "context.skip_key_gradient"),
        ("causal", "ring", "context.skip_key_gradient"),
        ("causal", "all_gather", "context.order_of_ranks"),
        ("causal", "all_to_all", "context.order_of_ranks"),
        ("alibi", "ring", "context.order_of_ranks"),
    ],
)
def test_a_seeded_fault_shows(name: str, method: str, fault: str, ones: Any, ranks: Ranks) -> None:
    assert not same(ones[name], ranks(2, measure, name, method, fault))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pytorchs_kernel_computes_a_part_of_the_keys_given_what_is_known_of_all(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, n, 8, dtype=dtype) for n in (4, 10, 10, 4))
    hidden = torch.cat((torch.ones(4, 4).triu(1).bool(), torch.zeros(4, 6).bool()), 1)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    scores = (exact[0] @ exact[1].transpose(-1, -2) * 0.3).masked_fill(hidden, float("-inf"))
    out, sums = scores.softmax(-1) @ exact[2], scores.logsumexp(-1).detach()
    out.backward(grad.double())
    merged, found = torch.zeros(2, 3, 4, 8), [torch.zeros(x.shape) for x in (q, k, v)]
    for keys in (slice(0, 4), slice(4, 10)):
        part, part_sums = attention_block(q, k[:, :, keys], v[:, :, keys], keys.start == 0, 0.3)
        merged += part.float() * (part_sums - sums.float()).exp().unsqueeze(-1)
        grads = attention_block_backward(
            grad, q, k[:, :, keys], v[:, :, keys], out.detach().to(dtype), sums.float(), keys.start == 0, 0.3
        )  # fmt: skip
        found[0] += grads[0].float()
        found[1][:, :, keys], found[2][:, :, keys] = grads[1].float(), grads[2].float()
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}  # bf16 rounds to 2^-9
    torch.testing.assert_close(merged, out.float(), **close)
    for mine, wanted in zip(found, exact):
        assert wanted.grad is not None
        torch.testing.assert_close(mine, wanted.grad.float(), **close)


def test_every_process_holds_an_early_and_a_late_chunk() -> None:
    assert places_of(0, 2, 8).tolist() == [0, 1, 6, 7] and places_of(1, 2, 8).tolist() == [2, 3, 4, 5]
    work = [sum(int(p) + 1 for p in places_of(r, 4, 64)) for r in range(4)]  # keys that the queries see
    assert len(set(work)) == 1


class Chain(ChainModel):
    """Units as they are given."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def units(self) -> dict[str, nn.Module]:
        return dict(self.named_children())


def communicator(size: int) -> Any:
    """Return one of several processes that never send anything."""
    from dufu.parallel.collectives import Communicator

    return Communicator("context", None, list(range(size)), 0)


def test_heads_that_do_not_divide_are_an_error_that_names_the_numbers() -> None:
    with pytest.raises(
        LayoutError, match=r"layer: 4 attention heads do not divide over train.dist.context_parallel_size=3.*fits is 2"
    ):
        split_context(Chain(layer=Attention(24, 4)), communicator(3), "all_to_all")
    with pytest.raises(LayoutError, match=r"layer: 2 key-value heads do not divide over train.dist.context_parallel_size=4"):
        split_context(Chain(layer=Attention(24, 4, 2)), communicator(4), "all_to_all")
    for method in ("all_gather", "ring"):
        split_context(Chain(layer=Attention(24, 4, 2)), communicator(3), method)


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(LayoutError, match="Linear is none"):
        split_context(nn.Linear(2, 2), communicator(2), "ring")
    with pytest.raises(NotBuiltError, match="path: where processes share samples, only a TransformerLayer"):
        split_context(Chain(path=DropPath(0.1)), communicator(2), "ring")
    split_context(Chain(path=DropPath(0.0), layer=TransformerLayer(8, 8, 2, drop_path_prob=0.1)), communicator(2), "ring")
    model = Chain(table=LearnedPositionalEmbedding(10, 4))
    split_context(model, communicator(2), "ring")
    ids = torch.zeros(1, 10, dtype=torch.long)
    with pytest.raises(LayoutError, match="11 tokens do not fit into max_seq_length=10"):
        model.view(Batch(torch.zeros(1, 11, dtype=torch.long), torch.zeros(1, 11, dtype=torch.long)))
    with pytest.raises(NotBuiltError, match=r'"regions" \(1, 10, 4\)'):
        model.view(Batch(ids, ids, extra={"regions": torch.zeros(1, 10, 4)}))
    with pytest.raises(ConfigError, match="mask of its own"):
        model.view(Batch(ids, ids, mask=Mask()))


def test_a_mask_or_bias_must_say_which_queries_it_is_of() -> None:
    model = Chain(layer=Attention(8, 2))
    split_context(model, communicator(2), "ring")
    batch = model.prepare(Batch(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)))
    x = torch.zeros(1, 4, 8)
    with pytest.raises(ConfigError, match=r"held=batch\.held"):
        model.layer(x, torch.ones(4, 4).bool())
    with pytest.raises(ConfigError, match="8 rows, but the mask is of 4 queries"):
        model.layer(x, batch.mask, bias=AlibiBias(2)(8))
    model.train()
    model.layer.dropout.p = 0.1
    with pytest.raises(ConfigError, match="needs dropout keys"):
        model.layer(x, batch.mask)


def test_a_view_cuts_every_field_and_is_the_same_when_taken_again() -> None:
    """Labels of whole samples are judged by the process that holds the first token."""
    seen = []
    for rank in (0, 1):
        model = Chain(layer=Attention(8, 2))
        model.causal = False
        shared = communicator(2)
        shared.rank = rank
        split_context(model, shared, "all_gather")
        ids = torch.arange(10).view(2, 5)
        given = Batch(ids, ids + 100, keys=ids + 200, token_types=ids + 300, extra={"pair_labels": torch.tensor([1, 0])})
        batch = model.view(given)
        assert model.view(batch) is batch and given.held is None
        assert model.view(Batch(ids)).held is None  # nothing is scored: text, whole on every process
        seen.append(batch)
    assert [b.places.tolist() for b in seen] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert seen[0].input_ids.tolist() == [[0, 1, 0, 0], [5, 6, 0, 0]] and seen[1].labels.tolist()[0] == [102, 103, 104, -100]
    assert seen[1].positions.tolist()[0] == [2, 3, 4, 0] and seen[1].keys.tolist()[0] == [202, 203, 204, 0]
    assert seen[1].token_types.tolist()[0] == [302, 303, 304, 0]
    assert seen[0].padding.tolist()[0] == [True] * 5 + [False] * 3 and seen[0].length == 8
    assert [b.extra["pair_labels"].tolist() for b in seen] == [[1, 0], [-100, -100]]
