"""Encoder-decoder models in every layout: one update is that of one process, dropout on, and what is shared stays one parameter."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from dufu.errors import ConfigError, NotBuiltError
from dufu.layers.random import token_keys
from dufu.models import T5, Bart, Batch
from dufu.parallel import faults
from dufu.parallel.layout import Pipelining
from tests.parallel.shared_positions import joined
from tests.pool import Ranks

_COMMON: dict[str, Any] = {
    "vocab_size": 101, "hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 48, "max_seq_length": 16,
    "embedding_dropout_prob": 0.1, "attention_dropout_prob": 0.2, "activation_dropout_prob": 0.1, "output_dropout_prob": 0.1,
}  # fmt: skip
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "t5": (T5, {"head_size": 8, "activation": "gelu", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}),
    "t5 v1.1": (T5, {"gated_mlp": True, "activation": "gelu_tanh", "tie_word_embeddings": False, "decoder_layers": 3}),
    "bart": (Bart, {"initializer_range": 0.2, "pad_token_id": 1, "scale_embedding": True}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"data": 2},
    "tp2": {"tensor": 2},
    "sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "pp4": {"pipeline": 4},
    "zero1": {"data": 2, "zero_stage": 1},
    "zero2": {"data": 2, "zero_stage": 2},
    "zero3": {"data": 2, "zero_stage": 3},
    "cp2 all_gather": {"context": 2, "context_method": "all_gather"},
    "cp2 all_to_all": {"context": 2, "context_method": "all_to_all"},
    "cp2 ring": {"context": 2, "context_method": "ring"},
    "tp2 pp2": {"tensor": 2, "pipeline": 2},
    "sp pp2": {"tensor": 2, "sequence": True, "pipeline": 2},
    "dp2 pp2 zbv": {"data": 2, "pipeline": 2, "pipelining": Pipelining("zbv", 2)},
    "sp cp2": {"tensor": 2, "sequence": True, "context": 2, "context_method": "all_gather"},
    "zero3 pp2": {"data": 2, "zero_stage": 3, "pipeline": 2},
    "pp2 cp2": {"pipeline": 2, "context": 2, "context_method": "ring"},
}
EVERY = os.environ.get("DUFU_MODELS") == "all"
QUICK = {
    "t5": ("dp2", "sp", "pp2", "zero3", "cp2 all_gather", "cp2 ring", "tp2 pp2", "dp2 pp2 zbv"),
    "t5 v1.1": ("pp2", "tp2"),
    "bart": ("tp2", "cp2 all_to_all", "sp pp2"),
}
CASES = [(kind, name) for kind in MODELS for name in LAYOUTS if EVERY or name in QUICK[kind]]


def processes_of(layout: dict[str, Any]) -> int:
    size = 1
    for name in ("data", "tensor", "pipeline", "context"):
        size *= layout.get(name, 1)
    return size


def lay_out(kind: str, layout: dict[str, Any], **options: Any) -> Any:
    from dufu.optim import get_default_optimizer_params
    from dufu.parallel.build import distribute
    from dufu.parallel.layout import ParallelLayout
    from dufu.parallel.process import choose_device, join

    model, more = MODELS[kind]
    processes = join(ParallelLayout(**layout), choose_device("cpu"))
    return distribute(lambda: model(**{**_COMMON, **more}), processes, get_default_optimizer_params, seed=5, **options)


def batches_of(rank: int, size: int) -> list[Batch]:
    """Return this replica's micro-batches of four samples: 11 tokens to read, padded unequally, and 7 to write, scored unequally."""
    generator = torch.Generator().manual_seed(3)
    ids, written = (torch.randint(2, 101, (4, length), generator=generator) for length in (11, 7))
    padding = torch.arange(11) < torch.tensor([11, 8, 11, 5])[:, None]
    labels = written.masked_fill(torch.arange(7) >= torch.tensor([7, 3, 5, 7])[:, None], -100)
    start = torch.cat([torch.ones(4, 1, dtype=torch.int64), written[:, :-1]], 1)
    out = []
    for half in torch.arange(4).chunk(2):
        m = half.chunk(size)[rank]
        own, others = (token_keys(5, 0, m, torch.arange(length).expand(len(m), length)) for length in (11, 7))
        out.append(Batch(ids[m], padding=padding[m], keys=own, decoder=Batch(start[m], labels[m], keys=others)))
    return out


def one_update(kind: str, layout: dict[str, Any], fault: str | None = None, **options: Any) -> dict[str, Any]:
    """Make one update of plain gradient descent from two micro-batches; return all that must be equal, and what was divided."""
    from dufu.training.clip import global_norm

    d = lay_out(kind, layout, **options)
    batches = batches_of(d.processes.data.rank, d.processes.data.size)
    d.model.train()
    seen: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        unit = getattr(d.model, side).layers[1]
        unit.register_forward_hook(
            lambda _, x, y, side=side: seen.update({side: tuple((y[0] if isinstance(y, tuple) else y).shape)})
        )
    sums: dict[str, Tensor] = {}

    def loss(found: dict[str, Tensor]) -> Tensor:
        for name, value in found.items():
            sums[name] = sums.get(name, torch.zeros(())) + value.detach().float()
        return found["loss"] / 10

    with faults.inject(fault) if fault else nullcontext():
        counted = torch.tensor(float(sum(d.model.counts(d.model.view(b))["tokens"] for b in batches)))
        d.runner.train(batches, nullcontext, loss)
        d.store.finish()
    norm = float(global_norm(d.store, d.processes))
    with torch.no_grad():
        for entry in d.store.entries:
            entry.tensor -= 0.1 * entry.tensor.grad
    d.store.publish()
    for value in (*sums.values(), counted):
        d.processes.replicas.sum_(value)
    assert not sums or float(sums["tokens"]) == float(counted) == 22
    shared = {i.name: len(i.units) for i in d.infos if len(i.units) > 1}
    return {
        "loss": float(sums["loss"]) if sums else None, "norm": norm, "after": weights(d), "seen": seen,
        "shared": shared, "held": sum(e.tensor.numel() for e in d.store.entries),
    }  # fmt: skip


def weights(distributed: Any) -> dict[str, Tensor]:
    """Return the trained parameters, put together, of a model that has others too."""
    infos = distributed.infos
    distributed.infos = [i for i in infos if i.parameter.requires_grad]
    try:
        return joined(distributed)
    finally:
        distributed.infos = infos


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    found = [abs(other["norm"] - one["norm"]) / one["norm"]]
    found += [abs(other["loss"] - one["loss"]) / one["loss"]] if other["loss"] is not None else []
    found += [float((other["after"][k] - v).abs().max() / v.abs().max()) for k, v in one["after"].items()]
    return max(found)


@pytest.fixture(scope="module")
def whole(ranks: Ranks) -> Any:
    found: dict[str, Any] = {}

    def one(kind: str) -> dict[str, Any]:
        if kind not in found:
            found[kind] = ranks(1, one_update, kind, {})[0]
        return found[kind]

    return one


UPDATE = 1e-5  # fp32 sums of a few hundred terms in another order


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_one_update_is_that_of_one_process(kind: str, name: str, whole: Any, ranks: Ranks) -> None:
    """11 and 7 tokens are padded to 12 and 8 where positions are divided."""
    layout, one = LAYOUTS[name], whole(kind)
    for part in ranks(processes_of(layout), one_update, kind, layout):
        assert distance(one, part) < UPDATE
        assert part["shared"] == one["shared"]
        rows = layout.get("tensor", 1) if layout.get("sequence") else 1
        parts = rows * layout.get("context", 1)
        wanted = {"encoder": 12 // parts, "decoder": 8 // parts} if parts > 1 else {"encoder": 11, "decoder": 7}
        assert part["seen"] or layout.get("pipeline") == 4  # of four stages some hold no second layer
        assert all(part["seen"][side][1] == wanted[side] for side in part["seen"])
        if "pipeline" in layout:
            assert part["held"] < one["held"] and len(part["seen"]) < 2 + (kind == "t5 v1.1" or "zbv" in name)
        if "tensor" in layout or layout.get("zero_stage"):
            assert part["held"] < 0.75 * one["held"]


def test_what_layers_share_is_one_parameter(whole: Any) -> None:
    assert whole("t5")["shared"] == {
        "encoder.embedding.word.weight": 3, "encoder.layers.0.relative.weight": 2, "decoder.layers.0.relative.weight": 2,
    }  # fmt: skip
    assert whole("t5 v1.1")["shared"] == {
        "encoder.embedding.word.weight": 2, "encoder.layers.0.relative.weight": 2, "decoder.layers.0.relative.weight": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("tp2", "tensor.skip_enter"),
        ("pp2", "pipeline.untied"),
        ("sp", "sequence.skip_scatter"),
        ("cp2 all_gather", "context.skip_key_gradient"),
        ("cp2 ring", "context.order_of_ranks"),
        ("cp2 all_gather", "context.dropout_by_rank"),
    ],
)
def test_a_seeded_fault_turns_it_red(name: str, fault: str, whole: Any, ranks: Ranks) -> None:
    layout = LAYOUTS[name]
    found = ranks(processes_of(layout), one_update, "t5", layout, fault)
    assert max(distance(whole("t5"), part) for part in found) > 10 * UPDATE


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("name", ["", "sp", "pp2"])
def test_recomputation_changes_no_bit(name: str, mode: str, ranks: Ranks) -> None:
    layout = LAYOUTS.get(name, {})
    size = processes_of(layout)
    for once, again in zip(ranks(size, one_update, "t5", layout), ranks(size, _recomputed, "t5", layout, mode)):
        assert once["loss"] == again["loss"] and all(torch.equal(v, again["after"][k]) for k, v in once["after"].items())


def _recomputed(kind: str, layout: dict[str, Any], mode: str) -> dict[str, Any]:
    return one_update(kind, layout, recompute=mode)


def test_samples_of_several_documents_are_refused() -> None:
    model = T5(**_COMMON)
    batch = batches_of(0, 1)[0]
    batch.documents = torch.zeros_like(batch.input_ids)
    with pytest.raises(NotBuiltError, match="several documents"):
        model(batch)
    batch = batches_of(0, 1)[0]
    batch.decoder = None
    with pytest.raises(ConfigError, match="decoder_input_ids"):
        model(batch)
