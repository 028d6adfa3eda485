"""One update of a whole small model whose processes share positions, for the tests of sequence and context parallelism."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dufu.parallel import faults

WORDS = 101
_COMMON: dict[str, Any] = {"hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "max_seq_length": 16, "vocab_size": WORDS,
                           "initializer_range": 0.2, "embedding_dropout_prob": 0.1, "attention_dropout_prob": 0.2,
                           "output_dropout_prob": 0.1, "ffn_hidden_size": 48}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2 without attention dropout": ("gpt2", {"attention_dropout_prob": 0.0}),
    "gpt2 with whole branches dropped": ("gpt2", {}),
    "llama": ("llama", {"num_key_value_heads": 2}),
    "mixture": ("llama", {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_capacity_factor": 1.2, "moe_shared_experts": 1}),
    "gpt2 of four layers": ("gpt2", {"hidden_layers": 4}),
    "bert": ("bert", {}),
    "bert before": ("bert", {"apply_residual_post_layernorm": False}),
    "classifier": ("bert_classifier", {"num_labels": 3}),
}


def lay_out(kind: str, layout: dict[str, Any], **options: Any) -> Any:
    from dufu.config.registry import lookup
    from dufu.optim import get_default_optimizer_params
    from dufu.parallel.build import distribute
    from dufu.parallel.layout import ParallelLayout
    from dufu.parallel.process import choose_device, join

    name, more = MODELS[kind]
    model, given = lookup(name, "model"), {k: v for k, v in {**_COMMON, **more}.items() if v != "none of its"}
    processes = join(ParallelLayout(**layout), choose_device("cpu"))

    def make() -> Any:
        made = model(**given)
        if "branches" in kind:
            for layer in made.layers:
                layer.block.attention_drop_path.p = layer.block.mlp_drop_path.p = 0.4
        return made

    return distribute(make, processes, get_default_optimizer_params, seed=5, **options)


def batches_of(kind: str, length: int, packed: bool, rank: int, size: int) -> list[Any]:
    """Return this replica's micro-batches of four samples: two, of the lengths given."""
    from dufu.layers.random import token_keys
    from dufu.models import Batch

    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, WORDS, (4, length), generator=generator)
    share = 0.3 if "bert" in kind else 0.9
    labels = torch.where(torch.rand(4, length, generator=generator) < share, ids.flip(1), -100)
    real = torch.arange(length) < torch.tensor([length, length - 3, length, 5])[:, None]
    padding = real if "bert" in kind or "classifier" in kind else None
    labels = labels if padding is None else labels.masked_fill(~padding, -100)
    documents = torch.arange(length).expand(4, length) // 4 if packed else None
    keys = token_keys(5, 0, torch.arange(4), torch.arange(length).expand(4, length))
    pair = torch.tensor([0, 1, 1, -100])
    types = (torch.arange(length) > 4).long().expand(4, length)
    out = []
    for half in torch.arange(4).chunk(2):
        m = half.chunk(size)[rank]
        extra = {"sentence_labels": pair[m]} if "bert" in kind or "classifier" in kind else {}
        out.append(Batch(
            ids[m], None if kind == "classifier" else labels[m], keys=keys[m], padding=None if padding is None else padding[m],
            documents=None if documents is None else documents[m], token_types=types[m] if extra else None, extra=extra,
        ))  # fmt: skip
    return out


def joined(distributed: Any) -> dict[str, Tensor]:
    """Return every whole parameter by name, put together from the processes' entries."""
    from dufu.parallel.region import Region, copy_overlap, whole_region

    shapes = {i.name: i.shape for i in distributed.infos}
    out = {name: torch.full((torch.Size(shape).numel(),), float("nan")) for name, shape in shapes.items()}
    pieces = [
        (p.info.name, p.region.to_json(), e.tensor.detach().reshape(-1)[p.start : p.start + p.length].tolist())
        for e in distributed.store.entries for p in e.pieces
    ]  # fmt: skip
    for name, region, values in (piece for part in distributed.processes.world.objects(pieces) for piece in part):
        copy_overlap(out[name], whole_region(shapes[name]), torch.tensor(values), Region.from_json(region))
    assert all(bool(v.isfinite().all()) for v in out.values())
    return {name: values.view(shapes[name]) for name, values in out.items()}


def one_update(
    kind: str,
    layout: dict[str, Any],
    length: int = 12,
    packed: bool = False,
    half: bool = False,
    fault: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Make one update of plain gradient descent with rate 1 from two micro-batches; return all that must be equal."""
    from dufu.training.clip import global_norm

    d = lay_out(kind, layout, **options)
    batches = batches_of(kind, length, packed, d.processes.data.rank, d.processes.data.size)
    d.model.train()
    seen: dict[str, Any] = {}
    blocks = [layer.block for layer in d.model.layers]
    blocks[1].register_forward_pre_hook(lambda _, x: seen.update(stream=tuple(x[0].shape)))
    blocks[1].attention.register_forward_hook(lambda _, x, y: seen.update(branch=tuple(y.shape)))
    sums: dict[str, Tensor] = {}

    def loss(found: dict[str, Tensor]) -> Tensor:
        for name, value in found.items():
            sums[name] = sums.get(name, torch.zeros(())) + value.detach().float()
        return torch.stack([found[name].float() / 10 for name in d.model.objectives]).sum()

    with faults.inject(fault) if fault else nullcontext():
        counted = [d.model.counts(d.model.view(b)) for b in batches]
        d.runner.train(batches, lambda: torch.autocast("cpu", torch.bfloat16) if half else nullcontext(), loss)
        d.store.finish()
    norm = float(global_norm(d.store, d.processes))
    with torch.no_grad():
        for entry in d.store.entries:
            entry.tensor -= entry.tensor.grad
    d.store.publish()
    for value in sums.values():
        d.processes.replicas.sum_(value)
    counts = {name: torch.tensor(float(sum(c[name] for c in counted))) for name in counted[0]}
    for value in counts.values():
        d.processes.replicas.sum_(value)
    assert not sums or all(float(sums[name]) == float(value) for name, value in counts.items())
    return {
        "sums": {name: float(value) for name, value in sums.items()}, "norm": norm, "after": joined(d), "seen": seen,
        "sent": {c.name: dict(c.sent) for c in (d.processes.tensor, d.processes.context)},
    }  # fmt: skip


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest relative difference of sums, norm and weights; of weights, relative to the largest of the parameter.

    Sums come to be in the last stage of a pipeline.
    """
    found = [abs(other["norm"] - one["norm"]) / one["norm"]]
    found += [abs(other["sums"][k] - v) / max(abs(v), 1e-30) for k, v in one["sums"].items() if other["sums"]]
    found += [float((other["after"][k] - v).abs().max() / v.abs().max()) for k, v in one["after"].items()]
    return max(found)
