"""A chain of an encoder and a decoder: both streams pass through the pipeline, and the memory's gradient comes back from every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dufu.layers.embedding import VocabEmbedding
from dufu.layers.head import LMLogits
from dufu.layers.loss import IGNORE, cross_entropy_sum
from dufu.layers.mask import build_mask
from dufu.layers.transformer import TransformerLayer
from dufu.models.chain import Batch, ChainModel
from tests.pool import Ranks


class Source(nn.Module):
    """The encoder's embedding; its ids are `batch.extra["source"]`."""

    def __init__(self, word: VocabEmbedding) -> None:
        super().__init__()
        self.word = word

    def forward(self, state: None, batch: Batch) -> Tensor:
        hidden: Tensor = self.word(batch.extra["source"])
        return hidden


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = TransformerLayer(16, 32, 4)

    def forward(self, state: Tensor, batch: Batch) -> Tensor:
        hidden: Tensor = self.block(state)
        return hidden


class Target(nn.Module):
    """The decoder's embedding, the same table: from here on the state is (hidden, memory)."""

    def __init__(self, word: VocabEmbedding) -> None:
        super().__init__()
        self.word = word

    def forward(self, state: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.word(batch.input_ids), state


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = TransformerLayer(16, 32, 4, attention_dropout_prob=0.1, output_dropout_prob=0.1, is_decoder=True)

    def forward(self, state: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        hidden, memory = state
        mask = build_mask(causal=True, queries=hidden.shape[1])
        return self.block(hidden, mask, batch.keys, memory=memory), memory


class Head(nn.Module):
    def __init__(self, word: VocabEmbedding) -> None:
        super().__init__()
        self.word, self.logits = word, LMLogits(24)

    def forward(self, state: tuple[Tensor, Tensor], batch: Batch) -> dict[str, Tensor]:
        assert batch.labels is not None
        scores, labels = self.logits(state[0], self.word.weight).flatten(0, 1), batch.labels.flatten()
        loss = cross_entropy_sum(scores, labels, split=self.logits.split, vocab_size=24)
        return {"loss": loss, "tokens": (labels != IGNORE).sum()}


class TwoStreams(ChainModel):
    def __init__(self) -> None:
        super().__init__()
        word = VocabEmbedding(24, 16)
        self.source, self.target, self.head = Source(word), Target(word), Head(word)
        self.encoder = nn.ModuleList(Encoder() for _ in range(2))
        self.decoder = nn.ModuleList(Decoder() for _ in range(4))
        self.finish()

    def units(self) -> dict[str, nn.Module]:
        encoder = {f"encoder.{i}": unit for i, unit in enumerate(self.encoder)}
        decoder = {f"decoder.{i}": unit for i, unit in enumerate(self.decoder)}
        return {"source": self.source, **encoder, "target": self.target, **decoder, "head": self.head}


def batches(count: int) -> list[Batch]:
    """Return micro-batches of unequal lengths and unequal numbers of scored tokens."""
    from dufu.layers.random import token_keys

    made = []
    for number in range(count):
        draw = torch.Generator().manual_seed(number)
        length, source = 5 + number % 3, 4 + number % 2
        ids = torch.randint(0, 24, (2, length), generator=draw)
        labels = torch.randint(0, 24, (2, length), generator=draw).masked_fill(torch.rand(2, length, generator=draw) < 0.3, IGNORE)
        keys = token_keys(1, 0, torch.arange(2) + 2 * number, torch.arange(length).expand(2, length))
        made.append(Batch(ids, labels, keys=keys, extra={"source": torch.randint(0, 24, (2, source), generator=draw)}))
    return made


def gradients(layout: dict[str, Any], how: dict[str, Any]) -> tuple[float, dict[str, list[float]], list[str]]:
    """Return the loss, the gradients that this process holds, by name, and the units that it runs."""
    from dufu.parallel.build import distribute
    from dufu.parallel.layout import ParallelLayout, Pipelining
    from dufu.parallel.process import join

    processes = join(ParallelLayout(**layout, pipelining=Pipelining(**how)), torch.device("cpu"))
    d = distribute(TwoStreams, processes, lambda m: [{"params": list(m.parameters())}], seed=3)
    d.model.train()
    total: list[Tensor] = []

    def loss(sums: dict[str, Tensor]) -> Tensor:
        total.append(sums["loss"].detach())
        return sums["loss"] / 100.0

    from contextlib import nullcontext

    d.runner.train(batches(5), nullcontext, loss)
    d.store.finish()
    found = {e.pieces[0].info.name: e.tensor.grad.flatten().tolist() for e in d.store.entries if e.tensor.grad is not None}
    units = [u for u, s in d.stage_of.items() if processes.layout.stage_owner(s) == processes.pipeline.rank]
    return float(sum(total)), found, units


@pytest.mark.parametrize(
    ("size", "how"),
    [
        (2, {"schedule": "1f1b"}),
        (2, {"schedule": "1f1b", "stage_ids": (0, 0, 0, 0, 1, 1)}),
        (3, {"schedule": "gpipe"}),
        (2, {"schedule": "interleaved_1f1b", "virtual": 2}),
        (2, {"schedule": "zbv", "virtual": 2}),
        (2, {"schedule": "dualpipev", "virtual": 2}),
    ],
)
def test_both_streams_pass_through_the_pipeline(size: int, how: dict[str, Any], ranks: Ranks) -> None:
    (loss, whole, _), *_ = ranks(1, gradients, {}, {})
    found = ranks(size, gradients, {"pipeline": size}, how)
    assert sum(part for part, _, _ in found) == pytest.approx(loss, rel=1e-6)
    assert len({tuple(units) for _, _, units in found}) == size  # each runs units of its own
    seen: set[str] = set()
    for _, mine, _ in found:
        assert len(mine) < len(whole)
        for name, grad in mine.items():
            seen.add(name)
            expected, got = torch.tensor(whole[name]), torch.tensor(grad)
            # fp32 sums in another order
            assert (got - expected).norm() <= 1e-5 * expected.norm() + 1e-7, name
    assert seen == set(whole)
    # the table is used by the first, a middle and the last unit: every process that holds it has the whole gradient
    holders = [mine["source.word.weight"] for _, mine, _ in found if "source.word.weight" in mine]
    assert len(holders) > 1 or "v" in how["schedule"]
    assert all(grad == holders[0] for grad in holders)
