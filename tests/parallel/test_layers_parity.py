"""Every layer that can be divided gives, divided, what it gives whole: outputs, gradients, and the update they make."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dufu import distributed
from dufu.layers import (
    MLP,
    AlibiBias,
    Attention,
    Conv1D,
    CrossEntropyLoss,
    GatedMLP,
    Linear,
    LMLogits,
    Normal,
    OutputEmbedding,
    RelativeBias,
    RotaryEmbedding,
    TransformerLayer,
    VocabEmbedding,
    build_mask,
)  # fmt: skip
from dufu.layers.dropout import name_places
from dufu.layers.loss import divided_argmax
from dufu.layers.random import token_keys
from dufu.parallel import faults
from tests.pool import Ranks

WORDS = 11  # divides over neither 2 nor 3 nor 4 processes
Inputs = dict[str, Tensor]
PADDING = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
KEYS = token_keys(1, 2, torch.arange(2), torch.arange(5).expand(2, 5))


class Case(nn.Module):
    """Parts, and what is computed with them."""

    def __init__(self, run: Callable[[Any, Inputs], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)
        name_places(self)

    def forward(self, inputs: Inputs) -> Tensor:
        return self.run(self, inputs)


def _attend(bias: bool = False, **arguments: Any) -> Callable[[Any, Inputs], Tensor]:
    def run(m: Any, i: Inputs) -> Tensor:
        given = {"bias": m.bias(5)} if bias else {}
        return m.layer(i["x"], build_mask(causal=True, queries=5, padding=PADDING), KEYS, **given, **arguments)

    return run


def _words(m: Any, i: Inputs) -> Tensor:
    hidden = m.table(i["ids"]) + i["x"]
    return m.loss(m.logits(hidden, (m.own if hasattr(m, "own") else m.table).weight), i["labels"]).unsqueeze(0)


_WIDE = Normal(0.4)
CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: Case(
        lambda m, i: m.row(m.col(i["x"]).tanh()), col=Linear(16, 24, parallel="col"), row=Linear(24, 16, parallel="row")
    ),
    "linear without bias": lambda: Case(
        lambda m, i: m.row(m.col(i["x"])), col=Linear(16, 24, False, "col"), row=Linear(24, 16, False, "row")
    ),
    "bias left to the caller": lambda: Case(
        lambda m, i: sum(m.row(m.col(i["x"]))), col=Linear(16, 24, parallel="col"), row=Linear(24, 16, parallel="row", skip_bias_add=True)
    ),
    "conv1d": lambda: Case(
        lambda m, i: m.row(torch.mul(*m.col(i["x"]).chunk(2, -1))),
        col=Conv1D(16, 48, parallel="col", sections=(24, 24)), row=Conv1D(24, 16, parallel="row"),
    ),
    "mlp": lambda: Case(lambda m, i: m.layer(i["x"]), layer=MLP(16, 24)),
    "gated mlp": lambda: Case(lambda m, i: m.layer(i["x"]), layer=GatedMLP(16, 24, bias=True)),
    "attention": lambda: Case(_attend(), layer=Attention(16, 12, head_size=4)),
    "attention with dropout": lambda: Case(_attend(), layer=Attention(16, 12, head_size=4, attention_dropout_prob=0.3)),
    "grouped attention": lambda: Case(_attend(), layer=Attention(16, 24, 12, head_size=4)),
    "rotary attention": lambda: Case(
        _attend(rotation=RotaryEmbedding(4)(torch.arange(5))), layer=Attention(16, 12, head_size=4)
    ),
    "relative bias": lambda: Case(_attend(True), layer=Attention(16, 12, head_size=4), bias=RelativeBias(12, 8, 16, init=_WIDE)),
    "alibi": lambda: Case(_attend(True), layer=Attention(16, 12, head_size=4), bias=AlibiBias(12)),
    "cross attention": lambda: Case(
        lambda m, i: m.layer(i["x"], memory=i["x"].flip(1) * 2), layer=Attention(16, 12, head_size=4, is_cross_attention=True)
    ),
    "decoder layer": lambda: Case(
        lambda m, i: m.layer(i["x"], build_mask(causal=True, queries=5), KEYS, memory=i["x"].flip(1)),
        layer=TransformerLayer(24, 48, 12, 0.2, 0.2, drop_path_prob=0.2, is_decoder=True),
    ),
    "words, tied": lambda: Case(
        _words, table=VocabEmbedding(WORDS, 16, init=_WIDE), logits=LMLogits(WORDS, bias=True), loss=CrossEntropyLoss(vocab_size=WORDS)
    ),
    "words, a padding row, label smoothing": lambda: Case(
        _words, table=VocabEmbedding(WORDS, 16, padding_idx=7, init=_WIDE), own=OutputEmbedding(WORDS, 16, _WIDE),
        logits=LMLogits(WORDS), loss=CrossEntropyLoss(label_smoothing=0.1, vocab_size=WORDS),
    ),
}  # fmt: skip


def measure(name: str, fault: str | None = None) -> dict[str, Any]:
    """Return output, gradient of the input, and output after an update, on this process."""
    torch.manual_seed(0)
    case = distributed.parallelize(CASES[name]())
    width = 24 if name == "decoder layer" else 16
    labels = torch.randint(0, WORDS, (2, 5))
    labels[0, 1] = -100
    ids = torch.randint(0, WORDS, (2, 5))
    ids[0, :2] = 7
    inputs = {"x": torch.randn(2, 5, width).requires_grad_(), "ids": ids, "labels": labels}
    with faults.inject(fault) if fault else nullcontext():
        out = case(inputs)
        weights = torch.randn_like(out)
        (out * weights).sum().backward()
        with torch.no_grad():
            for parameter in case.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad
            after = case(inputs)
    held = sum(p.numel() for p in case.parameters())
    assert inputs["x"].grad is not None
    return {"out": out.detach(), "grad": inputs["x"].grad, "after": after, "held": held}


def same(one: dict[str, Any], part: dict[str, Any]) -> bool:
    # fp32 sums of a few dozen terms in another order, of numbers up to about ten
    return all(torch.allclose(one[key], part[key], rtol=1e-4, atol=2e-5) for key in ("out", "grad", "after"))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_divided_layer_is_the_whole_one(name: str, size: int, ranks: Ranks) -> None:
    one = ranks(1, measure, name)[0]
    parts = ranks(size, measure, name)
    for part in parts:
        assert same(one, part)
        assert part["held"] < one["held"] * (0.8 if size == 2 else 0.7)
        assert torch.equal(part["out"], parts[0]["out"])


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("mlp", "tensor.skip_leave"),
        ("mlp", "tensor.skip_enter"),
        ("words, tied", "tensor.skip_leave"),
        ("attention", "tensor.skip_enter"),
    ],
)
def test_a_seeded_fault_shows(name: str, fault: str, ranks: Ranks) -> None:
    one = ranks(1, measure, name)[0]
    assert not all(same(one, part) for part in ranks(2, measure, name, fault))


def bad_number(what: str) -> str:
    torch.manual_seed(0)
    case: Any = distributed.parallelize(CASES["words, tied"]())
    ids, labels = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
    (ids if what == "word" else labels)[0, 0] = WORDS  # on the last process there is a padding row of that number
    try:
        case({"x": torch.zeros(1, 1, 16), "ids": ids, "labels": labels})
    except (IndexError, RuntimeError) as error:
        return f"refused: {error}"
    return "accepted"


@pytest.mark.parametrize("what", ["word", "label"])
def test_a_number_past_the_vocabulary_is_refused_as_on_one_process(what: str, ranks: Ranks) -> None:
    assert all(answer.startswith("refused") for size in (1, 2) for answer in ranks(size, bad_number, what))


def best_words(words: int) -> tuple[list[int], list[list[float]]]:
    torch.manual_seed(0)
    model: Any = distributed.parallelize(nn.ModuleDict({"table": OutputEmbedding(words, 4), "logits": LMLogits(words)}))
    with torch.no_grad():
        small_integers = (model["table"].weight * 60).round()  # exact products, and ties among them
        scores = model["logits"](torch.randn(50, 4).round(), small_integers)
        best = divided_argmax(scores, model["logits"].split, words)
        return best.tolist(), model["logits"].whole(scores).tolist()


@pytest.mark.parametrize("words", [3, 5, 11])
def test_the_best_word_and_the_whole_scores_are_those_of_one_process(words: int, ranks: Ranks) -> None:
    """Also where a process holds nothing but padding rows."""
    ((best, scores),) = ranks(1, best_words, words)
    for other_best, other_scores in ranks(4, best_words, words):
        assert other_best == best
        assert len(other_scores[0]) == words
        torch.testing.assert_close(torch.tensor(other_scores), torch.tensor(scores), rtol=1e-6, atol=1e-7)
