"""Several processes share the positions of every sample: attention reaches all keys in three ways, each with the numbers of one process."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dufu.layers import AlibiBias, Attention, Embedding, RelativeBias, RotaryEmbedding, build_mask
from dufu.layers.initial import Normal
from dufu.layers.random import token_keys
from dufu.models.chain import Batch, ChainModel
from dufu.parallel import faults
from dufu.parallel.context import attention_bytes, split_context
from dufu.parallel.layout import CONTEXT_METHODS, ParallelLayout
from dufu.parallel.process import choose_device, join, world_size
from dufu.parallel.view import places_of
from tests.parallel.shared_positions import MODELS, distance, one_update
from tests.pool import Ranks
from tests.small import TINY, metrics

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
    def __init__(self, kv_heads: int, dropout: float, bias: str, cross: bool, rotary: bool) -> None:
        super().__init__()
        wide = Normal(0.3)
        self.layer = Attention(24, HEADS, kv_heads, HEAD, cross, dropout, init=wide)
        self.bias = {"": None, "alibi": AlibiBias(HEADS), "relative": RelativeBias(HEADS, 8, 16, init=Normal(0.5))}[bias]
        self.rotary = RotaryEmbedding(HEAD) if rotary else None
        self.memory = Embedding(64, 24, init=Normal(0.7)) if cross else None

    def forward(self, state: Tensor, batch: Batch) -> Tensor:
        places = None if batch.held is None else batch.held.rows
        given: dict[str, Any] = {"mask": batch.mask, "keys": batch.keys}
        if self.bias is not None:
            given["bias"] = self.bias(batch.length, batch.length, places=places)
        if self.rotary is not None:
            given["rotation"] = self.rotary(batch.positions)
        if self.memory is not None:
            # the other sequence: the same tokens by another table, its padding hidden, every query seeing all of it
            given["memory"] = self.memory(batch.input_ids)
            queries = batch.input_ids.shape[1]
            given["mask"] = build_mask(causal=False, queries=queries, padding=batch.padding, held=batch.held)
        out: Tensor = self.layer(state, **given)
        return out


class Probe(ChainModel):
    """A table, an attention layer, and the layer's output as it is."""

    def __init__(
        self, causal: bool, kv_heads: int = HEADS, dropout: float = 0.0, bias: str = "", cross: bool = False, rotary: bool = False
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
    "cross": ({"causal": True, "cross": True, "dropout": 0.2}, 11, "padding"),
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


def measure(name: str, method: str = "all_gather", fault: str | None = None) -> dict[str, Any]:
    """Return the output at this process's places, the gradients summed over all, and what was sent."""
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


def test_every_process_holds_an_early_and_a_late_chunk() -> None:
    assert places_of(0, 2, 8).tolist() == [0, 1, 6, 7] and places_of(1, 2, 8).tolist() == [2, 3, 4, 5]
    work = [sum(int(p) + 1 for p in places_of(r, 4, 64)) for r in range(4)]  # keys that the queries see
    assert len(set(work)) == 1


# From here on whole models, dropout on: one update from two micro-batches.

UPDATE = 2e-5  # fp32 sums of a few hundred terms in another order, times a gradient of about ten


@pytest.fixture(scope="module")
def updates(ranks: Ranks) -> Any:
    found: dict[Any, Any] = {}

    def one(kind: str, length: int = 12, packed: bool = False, half: bool = False) -> dict[str, Any]:
        key = (kind, length, packed, half)
        if key not in found:
            found[key] = ranks(1, one_update, kind, {}, length, packed, half)[0]
        return found[key]  # type: ignore[no-any-return]

    return one


@pytest.mark.parametrize("method", CONTEXT_METHODS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_what_it_is_on_one_process(kind: str, method: str, updates: Any, ranks: Ranks) -> None:
    """11 positions are padded to 12."""
    for part in ranks(2, one_update, kind, {"context": 2, "context_method": method}, 11):
        assert distance(updates(kind, 11), part) < UPDATE
        assert part["seen"]["stream"][1] == 6 and sum(part["sent"]["context"].values()) > 0


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_packed_documents(method: str, updates: Any, ranks: Ranks) -> None:
    for part in ranks(2, one_update, "gpt2", {"context": 2, "context_method": method}, 11, True):
        assert distance(updates("gpt2", 11, True), part) < UPDATE


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "sequence": True},
        {"tensor": 2, "context_method": "all_to_all"},
        {"tensor": 2, "sequence": True, "context_method": "ring"},
        {"data": 2, "context_method": "ring"},
        {"data": 2, "zero_stage": 3},
        {"zero_stage": 2, "tensor": 2, "sequence": True},
        {"pipeline": 2, "context_method": "ring"},
        {"pipeline": 2, "context_method": "all_to_all"},
    ],
    ids=lambda layout: " ".join(f"{k}={v}" for k, v in layout.items()),
)
def test_beside_other_dimensions(layout: dict[str, Any], updates: Any, ranks: Ranks) -> None:
    for part in ranks(4, one_update, "gpt2", {"context": 2, **layout}, 11):
        assert distance(updates("gpt2", 11), part) < UPDATE


@pytest.mark.parametrize("method", CONTEXT_METHODS)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_with_recomputation(recompute: str, method: str, updates: Any, ranks: Ranks) -> None:
    run = functools.partial(one_update, recompute=recompute)
    for part in ranks(2, run, "gpt2", {"context": 2, "context_method": method}, 11):
        assert distance(updates("gpt2", 11), part) < UPDATE


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_with_compiled_units(method: str, updates: Any, ranks: Ranks) -> None:
    run = functools.partial(one_update, compile_units=True)
    for part in ranks(2, run, "gpt2", {"context": 2, "context_method": method}, 11, timeout=300):
        assert distance(updates("gpt2", 11), part) < UPDATE


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_under_autocast_half_precision_travels(method: str, updates: Any, ranks: Ranks) -> None:
    layout = {"context": 2, "context_method": method}
    single = ranks(2, one_update, "gpt2", layout)[0]["sent"]["context"]
    for part in ranks(2, one_update, "gpt2", layout, 12, False, True):
        # bf16 rounds to 2^-9, differently in each layout
        assert distance(updates("gpt2", 12, False, True), part) < 0.05
        for operation in {"all_gather", "reduce_scatter", "all_to_all"} & set(single):
            assert part["sent"]["context"][operation] == single[operation] // 2
        if method == "ring":  # gradients of what travels round stay float32: of six parts that travel, four halves
            assert part["sent"]["context"]["send"] == single["send"] * 3 // 4


# Whole runs, with evaluation: what a user starts.

RUNS = {
    "cp2": (2, ["train.dist.context_parallel_size=2"]),
    "cp2 all_to_all": (2, ["train.dist.context_parallel_size=2", "train.dist.context_parallel_method=all_to_all"]),
    "cp2 ring": (2, ["train.dist.context_parallel_size=2", "train.dist.context_parallel_method=ring"]),
    "cp2xdp2, zero2": (
        4, ["train.dist.context_parallel_size=2", "train.zero_optimization.enabled=true", "train.zero_optimization.stage=2"]
    ),
    "sp2": (2, ["train.dist.tensor_parallel_size=2", "train.dist.sequence_parallel=true"]),
    "sp2xcp2": (4, ["train.dist.tensor_parallel_size=2", "train.dist.sequence_parallel=true", "train.dist.context_parallel_size=2"]),
}  # fmt: skip


def run(recipe: str, folder: str, corpus: str, overrides: list[str], fault: str | None = None) -> None:
    from dufu.training.run import train

    settings = [
        "train.num_accumulation_steps=2",
        "train.train_iter=4",
        "train.evaluation.eval_period=2",
        "model.cfg.max_seq_length=23",
    ]
    with faults.inject(fault) if fault else nullcontext():
        train(recipe, [*TINY, f"train.output_dir={folder}", *settings, *overrides], data=[corpus])


@pytest.fixture(scope="module")
def alone(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {recipe: tmp_path_factory.mktemp(recipe) / "run" for recipe in ("gpt2_tiny", "bert_tiny")}
    for recipe, folder in folders.items():
        ranks(1, run, recipe, str(folder), str(corpus), [])
    return folders


def differences(one: Path, other: Path) -> dict[str, float]:
    """Return the largest relative difference of each number in two runs' records."""
    found: dict[str, float] = {}
    for split in (None, "valid"):
        ours, theirs = metrics(one, split), metrics(other, split)
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs):
            assert a.keys() == b.keys()
            for key, value in a.items():
                if isinstance(value, (int, float)):
                    found[key] = max(found.get(key, 0.0), abs(value - b[key]) / max(abs(value), 1e-12))
    return found


@pytest.mark.parametrize("recipe", ["gpt2_tiny", "bert_tiny"])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_writes_the_numbers_of_one_process(
    name: str, recipe: str, alone: Any, ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    size, overrides = RUNS[name]
    ranks(size, run, recipe, str(tmp_path / "run"), str(corpus), overrides)
    for key, difference in differences(alone[recipe], tmp_path / "run").items():
        exact = key in ("step", "tokens", "samples") or "accuracy" in key
        assert difference <= (0.0 if exact else 1e-4 if key == "grad_norm" else 1e-5), key  # fp32 sums in another order


@pytest.mark.parametrize(
    ("name", "fault"),
    [("cp2 ring", "context.skip_key_gradient"), ("cp2", "context.dropout_by_rank"), ("sp2", "sequence.skip_scatter")],
)
def test_a_seeded_fault_shows_in_a_run(name: str, fault: str, alone: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    size, overrides = RUNS[name]
    ranks(size, run, "gpt2_tiny", str(tmp_path / "run"), str(corpus), overrides, fault)
    found = differences(alone["gpt2_tiny"], tmp_path / "run")
    assert found["loss"] > 1e-5 or found["grad_norm"] > 1e-4
