"""BERT in any layout gives the numbers of one process; its shared word embedding stays one parameter everywhere."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.parallel import faults
from tests.pool import Ranks
from tests.small import TINY, metrics

LAYOUTS = {
    "dp2": (2, []),
    "tp2": (2, ["train.dist.tensor_parallel_size=2"]),
    "zero3": (2, ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"]),
    "dp2xtp2": (4, ["train.dist.tensor_parallel_size=2"]),
}
FAULTS = {"dp2": "data.skip_reduce", "tp2": "tensor.skip_enter", "zero3": "shard.scale", "dp2xtp2": "tensor.skip_leave"}
SCORES = ("loss", "lm_loss", "sentence_loss")


def pretrain(folder: str, corpus: str, overrides: list[str], fault: str | None = None) -> dict[str, Any]:
    """Pre-train on this rank, dropout and accumulation on; return what shows that the work was divided."""
    from dufu.training.hooks import Hook
    from dufu.training.run import train

    class Witness(Hook):
        seen: dict[str, Any] = {}  # noqa: RUF012

        def after_step(self, trainer: Any) -> None:
            d = trainer.train_step.distributed
            self.seen = {
                "words": tuple(d.model.embedding.word.weight.shape),
                "inner": tuple(d.model.layers[0].block.mlp.expand.weight.shape),
                "held": sum(e.tensor.numel() for e in d.store.entries),
                "sent": {c.name: sum(c.sent.values()) for c in (d.processes.data, d.processes.tensor)},
            }

    witness = Witness()
    with faults.inject(fault) if fault else nullcontext():
        train("bert_tiny", [*TINY, f"train.output_dir={folder}", "train.num_accumulation_steps=2", *overrides], data=[corpus],
              hooks=[witness])  # fmt: skip
    return witness.seen


@pytest.fixture(scope="module")
def one(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one") / "run"
    seen = ranks(1, pretrain, str(folder), str(corpus), [])[0]
    return metrics(folder), seen


def distance(a: list[dict[str, Any]], b: list[dict[str, Any]], key: str) -> float:
    assert len(a) == len(b) == 6
    return max(abs(x[key] - y[key]) / abs(x[key]) for x, y in zip(a, b))


@pytest.mark.parametrize("name", LAYOUTS)
def test_pretraining_equals_one_process(name: str, one: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    size, overrides = LAYOUTS[name]
    parts = ranks(size, pretrain, str(tmp_path / "run"), str(corpus), overrides)
    mine, (alone, whole) = metrics(tmp_path / "run"), one
    # fp32 sums in another order: about 1e-7 a step, growing slowly
    assert all(distance(alone, mine, key) < 1e-5 for key in SCORES)
    assert distance(alone, mine, "grad_norm") < 1e-4
    for key in ("samples", "tokens", "accuracy", "sentences_accuracy"):
        assert [r[key] for r in mine] == [r[key] for r in alone]
    for part in parts:
        if "tp2" in name:
            assert part["words"][0] == -(-whole["words"][0] // 2) and part["inner"][0] == whole["inner"][0] // 2
            assert part["sent"]["tensor"] > 0
        if name != "tp2":
            assert part["sent"]["data"] > 0
        if name == "zero3":
            assert part["held"] < 0.6 * whole["held"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_turns_it_red(name: str, one: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    size, overrides = LAYOUTS[name]
    ranks(size, pretrain, str(tmp_path / "run"), str(corpus), overrides, FAULTS[name])
    mine = metrics(tmp_path / "run")
    assert distance(one[0], mine, "loss") > 1e-5 or distance(one[0], mine, "grad_norm") > 1e-4


# From here on without a loop: what one forward, backward and update of the laid-out model give.

SMALL: dict[str, Any] = {
    "hidden_layers": 2, "hidden_size": 24, "ffn_hidden_size": 48, "num_attention_heads": 4, "max_seq_length": 16, "vocab_size": 101,
    "initializer_range": 0.3,
}  # fmt: skip


def lay_out(tensor: int = 1, data: int = 1, zero: int = 0, recompute: str | None = None, freeze: bool = False, **sizes: Any) -> Any:
    from dufu.models import Bert
    from dufu.optim import get_default_optimizer_params
    from dufu.parallel.build import distribute
    from dufu.parallel.layout import ParallelLayout
    from dufu.parallel.process import choose_device, join

    def make() -> Bert:
        model = Bert(**{**SMALL, **sizes})
        model.embedding.requires_grad_(not freeze)
        return model

    processes = join(ParallelLayout(data, tensor, zero), choose_device("cpu"))
    return distribute(make, processes, get_default_optimizer_params, seed=5, recompute=recompute)


def made_up(data_rank: int = 0, data_size: int = 1) -> Any:
    """Return this process's share of four samples."""
    from dufu.layers.random import token_keys
    from dufu.models import Batch

    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 101, (4, 12), generator=generator)
    labels = torch.where(torch.rand(4, 12, generator=generator) < 0.3, ids.flip(1), -100)
    padding = torch.arange(12) < torch.tensor([12, 9, 12, 5])[:, None]
    labels = labels.masked_fill(~padding, -100)
    keys = token_keys(5, 0, torch.arange(4), torch.arange(12).expand(4, 12))
    mine = torch.arange(4).chunk(data_size)[data_rank]
    pair = torch.tensor([0, 1, 1, -100])
    return Batch(ids[mine], labels[mine], padding=padding[mine], keys=keys[mine], extra={"sentence_labels": pair[mine]})


def backward(distributed: Any) -> float:
    """Run forward and backward over this process's share; return the loss summed over all."""
    processes, store = distributed.processes, distributed.store
    batch = made_up(processes.data.rank, processes.data.size)
    distributed.model.train()
    store.start_backward(0, last=True)
    sums = distributed.model(batch)
    loss = sums["lm_loss"] / 10 + sums["sentence_loss"] / 3
    loss.backward()
    store.end_backward(0, last=True)
    store.finish()
    total = loss.detach().clone()
    processes.data.sum_(total)
    return float(total)


def joined(distributed: Any) -> dict[str, torch.Tensor]:
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


def one_update(layout: dict[str, int]) -> dict[str, Any]:
    """Make one update of plain gradient descent with rate 1; return all that must be equal."""
    from dufu.training.clip import global_norm

    d = lay_out(**layout)
    before = joined(d)
    loss = backward(d)
    norm = float(global_norm(d.store, d.processes))
    with torch.no_grad():
        for entry in d.store.entries:
            entry.tensor -= entry.tensor.grad
    d.store.publish()
    names = [i.name for i in d.infos]
    return {
        "loss": loss, "norm": norm, "before": before, "after": joined(d),
        "shared": d.model.head.word.weight is d.model.embedding.word.weight,
        "words": [n for n in names if "word" in n],
        "total": sum(torch.Size(i.shape).numel() for i in d.infos),
        "optimized": sum(p.numel() for g in d.groups for p in g["params"]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("size", "layout"),
    [(2, {"tensor": 2}), (2, {"data": 2}), (2, {"data": 2, "zero": 3}), (4, {"data": 2, "tensor": 2, "zero": 2})],
    ids=["tp2", "dp2", "zero3", "zero2xtp2"],
)  # fmt: skip
def test_the_shared_embedding_is_one_parameter_with_one_update(size: int, layout: dict[str, int], ranks: Ranks) -> None:
    """B027, B031, B032, B050: tied on every process, counted once, begun alike and updated as on one process."""
    whole = ranks(1, one_update, {})[0]
    assert whole["words"] == ["embedding.word.weight"] and whole["optimized"] == whole["total"]
    for part in ranks(size, one_update, layout):
        assert part["shared"] and part["words"] == whole["words"] and part["total"] == whole["total"]
        assert part["loss"] == pytest.approx(whole["loss"], rel=1e-5)  # fp32 sums in another order
        assert part["norm"] == pytest.approx(whole["norm"], rel=1e-5)
        for name, value in whole["before"].items():
            assert torch.equal(part["before"][name], value), name  # bit-equal, in whatever parts it was made
            torch.testing.assert_close(part["after"][name], whole["after"][name], rtol=1e-4, atol=1e-5)


def scores(tensor: int, words: int) -> torch.Tensor:
    from dufu.models import Batch

    d = lay_out(tensor, vocab_size=words)
    d.model.eval()
    ids = torch.arange(24).view(2, 12) % words
    with torch.no_grad():
        return d.model(Batch(ids))


@pytest.mark.parametrize(("words", "size"), [(101, 2), (101, 4), (5, 4)])
def test_a_vocabulary_that_does_not_divide_shows_no_padding_in_scores(words: int, size: int, ranks: Ranks) -> None:
    """B032; of five words on four processes the last holds none."""
    whole = ranks(1, scores, 1, words)[0]
    for part in ranks(size, scores, size, words):
        assert part.shape == (2, 12, words)
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)  # scores up to about 20


def starts(tensor: int) -> dict[str, Any]:
    """Return what this process holds before the first step, after one process has drawn random numbers that the others have not."""
    d = lay_out(tensor)
    if d.processes.rank == 0:
        torch.rand(17)
    loss = backward(d)
    return {
        "loss": loss,
        "repeated": {i.name: i.parameter.detach().clone() for i in d.infos if not i.divided},
        "divided": {i.name: i.parameter.detach().clone() for i in d.infos if i.divided and i.parameter.dim() == 2},
    }  # fmt: skip


def test_repeated_weights_and_masks_are_equal_on_all_processes_and_parts_differ(ranks: Ranks) -> None:
    """B050 and B052, dropout on."""
    whole = ranks(1, starts, 1)[0]
    first, *others = ranks(4, starts, 4)
    assert first["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    for other in others:
        assert other["loss"] == first["loss"]
        assert all(torch.equal(other["repeated"][name], value) for name, value in first["repeated"].items())
        assert not any(torch.equal(other["divided"][name], value) for name, value in first["divided"].items())


def gradients(recompute: str | None, tensor: int, freeze: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    d = lay_out(tensor, recompute=recompute, freeze=freeze)
    loss = backward(d)
    return loss, {i.name: i.parameter.grad for i in d.infos if i.parameter.requires_grad}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("freeze", [False, True], ids=["", "frozen embedding"])
def test_recomputation_changes_no_bit(freeze: bool, mode: str, size: int, ranks: Ranks) -> None:
    """B049, dropout on; B055, a layer whose input needs no gradient."""
    plain = ranks(size, gradients, None, size, freeze)
    for (loss, kept), (again, remade) in zip(plain, ranks(size, gradients, mode, size, freeze)):
        assert loss == again and kept.keys() == remade.keys()
        assert all(remade[name] is not None and torch.equal(value, remade[name]) for name, value in kept.items())
        assert all(bool(value.any()) for name, value in kept.items() if name.endswith("weight"))


def refusal(heads: int, width: int, inner: int) -> str:
    from dufu.errors import LayoutError

    try:
        lay_out(2, num_attention_heads=heads, hidden_size=width, ffn_hidden_size=inner)
    except LayoutError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((3, 24, 48), "layers.0.block.attention: 3 attention heads do not divide over tensor_parallel_size=2; the nearest size that fits is 1"),
        ((4, 24, 49), "layers.0.block.mlp.expand.weight: 49 does not divide over tensor_parallel_size=2; the nearest length is 50"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_by_layer_and_by_both_numbers(
    sizes: tuple[int, int, int], said: str, ranks: Ranks
) -> None:
    assert ranks(2, refusal, *sizes) == [said, said]
