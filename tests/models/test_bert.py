"""BERT against one put together from PyTorch's own layers, and what its numbers must not depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from dufu.config.registry import lookup
from dufu.errors import ConfigError, LayoutError
from dufu.layers.random import token_keys
from dufu.models import Batch, Bert, BertClassifier
from dufu.models.bert import SIZES

VOCAB, LENGTH = 37, 12
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 4,
    "max_seq_length": 16,
}  # fmt: skip
STILL = {"embedding_dropout_prob": 0.0, "attention_dropout_prob": 0.0, "output_dropout_prob": 0.0}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # fp32 in another order, through two layers


def batch(samples: int = 4, length: int = LENGTH, seed: int = 0, keys: bool = False) -> Batch:
    """Return sentence pairs of unequal lengths, some words scored, one pair not judged."""
    torch.manual_seed(seed)
    ids = torch.randint(0, VOCAB, (samples, length))
    lengths = torch.tensor([length - (i * 3) % 7 for i in range(samples)])
    padding = torch.arange(length) < lengths[:, None]
    labels = torch.where((torch.rand(samples, length) < 0.3) & padding, torch.randint(0, VOCAB, (samples, length)), -100)
    labels[:, 1] = 5
    pair = torch.tensor([i % 2 for i in range(samples)])
    pair[-1] = -100
    places = torch.arange(length).expand(samples, length)
    return Batch(
        ids.masked_fill(~padding, 0), labels, padding=padding, token_types=(places >= length // 2).long(),
        keys=token_keys(7, 3, torch.arange(samples), places) if keys else None, extra={"sentence_labels": pair},
    )  # fmt: skip


def rows(b: Batch, chosen: slice) -> Batch:
    tensors = {
        n: getattr(b, n)[chosen] for n in ("input_ids", "labels", "padding", "token_types", "keys") if getattr(b, n) is not None
    }
    return Batch(**tensors, extra={k: v[chosen] for k, v in b.extra.items()})


def plain(model: Bert, b: Batch, norm_first: bool = False) -> dict[str, torch.Tensor]:
    """Run the same weights through PyTorch's layers."""
    e = model.embedding
    hidden = e.word.weight[b.input_ids] + e.position.weight[: b.input_ids.shape[1]] + e.token_type.weight[b.token_types]
    if not norm_first:
        hidden = functional.layer_norm(hidden, (16,), e.norm.weight, e.norm.bias, 1e-12)
    for unit in model.layers:
        block = unit.block
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", 1e-12, batch_first=True, norm_first=norm_first)
        pairs = {
            "self_attn.in_proj_": block.attention.query_key_value, "self_attn.out_proj.": block.attention.output,
            "linear1.": block.mlp.expand, "linear2.": block.mlp.contract, "norm1.": block.attention_norm, "norm2.": block.mlp_norm,
        }  # fmt: skip
        layer.load_state_dict({f"{k}{leaf}": getattr(m, leaf).detach() for k, m in pairs.items() for leaf in ("weight", "bias")})
        hidden = layer(hidden, src_key_padding_mask=~b.padding)
    head = model.head
    if norm_first:
        hidden = functional.layer_norm(hidden, (16,), head.norm.weight, head.norm.bias, 1e-12)
    words = functional.gelu(functional.linear(hidden, head.transform.weight, head.transform.bias))
    words = functional.layer_norm(words, (16,), head.transform_norm.weight, head.transform_norm.bias, 1e-12)
    scores = words @ e.word.weight.t() + head.logits.bias
    first = torch.tanh(functional.linear(hidden[:, 0], head.pooler.dense.weight, head.pooler.dense.bias))
    return {"words": scores, "pair": functional.linear(first, head.sentence.weight, head.sentence.bias)}


def lively(model: nn.Module) -> Any:
    """Give every parameter values that matter, so that a forgotten one shows."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("post", [True, False])
def test_bert_is_the_published_network(post: bool) -> None:
    model = lively(Bert(**SMALL, **STILL, apply_residual_post_layernorm=post))
    b = batch()
    wanted = plain(model, b, norm_first=not post)
    sums = model(b)
    loss = functional.cross_entropy(wanted["words"].flatten(0, 1), b.labels.flatten(), reduction="sum")
    judged = functional.cross_entropy(wanted["pair"], b.extra["sentence_labels"], reduction="sum")
    torch.testing.assert_close(sums["lm_loss"], loss, **CLOSE)
    torch.testing.assert_close(sums["sentence_loss"], judged, **CLOSE)
    scored = b.labels != -100
    assert sums["tokens"] == scored.sum() and sums["sentences"] == 3
    assert sums["correct"] == ((wanted["words"].argmax(-1) == b.labels) & scored).sum()
    assert sums["sentences_correct"] == (wanted["pair"].argmax(-1)[:3] == b.extra["sentence_labels"][:3]).sum()
    scores = model(Batch(b.input_ids, padding=b.padding, token_types=b.token_types))
    torch.testing.assert_close(scores[b.padding], wanted["words"][b.padding], **CLOSE)


def test_a_batch_in_parts_sums_to_the_whole_with_dropout_on() -> None:
    model = lively(Bert(**SMALL)).train()
    b = batch(6, keys=True)
    whole = model(b)
    parts = [model(rows(b, slice(start, start + 2))) for start in (4, 0, 2)]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value, **CLOSE)
    again = model(rows(b, slice(0, 6)))
    assert torch.equal(again["lm_loss"], whole["lm_loss"])


def test_more_padding_changes_nothing_with_dropout_on() -> None:
    model = lively(Bert(**SMALL)).train()
    b = batch(keys=True)
    longer = Batch(
        *(functional.pad(t, (0, 4), value=v) for t, v in ((b.input_ids, 9), (b.labels, -100))),
        padding=functional.pad(b.padding, (0, 4)), token_types=functional.pad(b.token_types, (0, 4)),
        keys=token_keys(7, 3, torch.arange(4), torch.arange(16).expand(4, 16)), extra=b.extra,
    )  # fmt: skip
    short, long = model(b), model(longer)
    for name, value in short.items():
        torch.testing.assert_close(long[name], value, **CLOSE)


def test_every_word_sees_both_sides_but_no_padding() -> None:
    model = lively(Bert(**SMALL, **STILL)).eval()
    b = batch()
    ask = Batch(b.input_ids, padding=b.padding, token_types=b.token_types)
    before = model(ask)
    later = b.input_ids.clone()
    later[1, 8] = (later[1, 8] + 1) % VOCAB  # sample 1 has 9 words
    assert not torch.allclose(model(Batch(later, padding=b.padding, token_types=b.token_types))[1, 0], before[1, 0], atol=1e-4)
    later = b.input_ids.masked_fill(~b.padding, 11)
    after = model(Batch(later, padding=b.padding, token_types=b.token_types))
    torch.testing.assert_close(after[b.padding], before[b.padding], **CLOSE)


def test_counts_come_from_the_labels_alone() -> None:
    model = Bert(**SMALL)
    b = batch()
    assert model.counts(b) == {"tokens": int((b.labels != -100).sum()), "sentences": 3}
    assert model.objectives == {"lm_loss": "tokens", "sentence_loss": "sentences"}
    assert Bert(**SMALL, sentence_objective=False).objectives == {"lm_loss": "tokens"}
    assert Bert.objectives == {"loss": "tokens"}  # one model's choice is not the class's


def test_without_the_sentence_objective_there_is_no_pooler_and_no_sum_of_it() -> None:
    model = Bert(**SMALL, sentence_objective=False)
    assert not [n for n, _ in model.named_parameters() if "pooler" in n or "sentence" in n]
    b = batch()
    b.extra = {}
    assert set(model(b)) == {"lm_loss", "tokens", "correct"}


def test_a_sentence_objective_without_sentence_labels_is_an_error_with_the_remedy() -> None:
    b = batch()
    b.extra = {}
    for use in (lambda m: m(b), lambda m: m.counts(b)):
        with pytest.raises(ConfigError, match=r"sentence_objective=true.*set it to false"):
            use(Bert(**SMALL))


def test_a_batch_that_scores_nothing_adds_zero_and_zero_gradients() -> None:
    model = Bert(**SMALL)
    b = batch()
    b.labels, b.extra = torch.full_like(b.labels, -100), {"sentence_labels": torch.full((4,), -100)}
    sums = model(b)
    (sums["lm_loss"] + sums["sentence_loss"]).backward()
    assert all(not float(v.detach()) for v in sums.values())
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_only_scored_words_meet_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    model, b, seen = Bert(**SMALL), batch(), []
    model.head.logits.register_forward_hook(lambda m, i, o: seen.append(tuple(o.shape)))
    model(b)
    assert seen == [(int((b.labels != -100).sum()), VOCAB)]


def test_half_precision_with_a_sample_of_padding_alone_stays_finite() -> None:
    model = lively(Bert(**SMALL)).train()
    b = batch(keys=True)
    b.padding[2] = False
    with torch.autocast("cpu", torch.bfloat16):
        sums = model(b)
    (sums["lm_loss"] + sums["sentence_loss"]).backward()
    assert all(bool(v.isfinite()) for v in sums.values())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_the_word_embedding_is_the_heads_too_and_learns_from_both() -> None:
    model = Bert(**SMALL)
    assert model.head.word is model.embedding.word
    assert [n for n, _ in model.named_parameters() if "word" in n] == ["embedding.word.weight"]
    b = batch()
    model(b)["lm_loss"].backward()
    grad = model.embedding.word.weight.grad
    assert grad is not None and bool((grad.abs().sum(-1) > 0).all())  # words that do not occur learn through the head


# Hugging Face's BertForPreTraining of the same size reports these totals.
@pytest.mark.parametrize(("name", "total"), [("bert_base", 110_106_428), ("bert_large", 336_226_108)])
def test_published_sizes_have_the_published_number_of_parameters(name: str, total: int) -> None:
    with torch.device("meta"):
        model = Bert(**SIZES[name])
    assert sum(p.numel() for p in model.parameters()) == total


def test_output_projections_begin_smaller_by_the_depth() -> None:
    torch.manual_seed(0)
    model = Bert(**{**SMALL, "hidden_size": 128, "hidden_layers": 8}, initializer_range=0.1)
    block = model.layers[3].block
    for weight, std in ((block.attention.query_key_value.weight, 0.1), (block.attention.output.weight, 0.1 / 4)):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)
    plain_init = Bert(**SMALL, use_scaled_init_for_output_weights=False).layers[0].block.attention.output
    assert float(plain_init.weight.detach().std()) == pytest.approx(0.02, rel=0.2)


def test_user_mistakes_are_errors() -> None:
    with pytest.raises(ConfigError, match="vocab_size is not set"):
        Bert()
    with pytest.raises(LayoutError, match="hidden_size 16 does not divide over 3"):
        Bert(**{**SMALL, "num_attention_heads": 3})
    with pytest.raises(LayoutError, match="17 tokens do not fit into max_seq_length=16"):
        Bert(**SMALL)(Batch(torch.zeros(1, 17, dtype=torch.long)))
    with pytest.raises(ConfigError, match="num_labels=0"):
        BertClassifier(num_labels=0, **SMALL)


def test_no_segments_means_no_segment_table() -> None:
    model = Bert(**SMALL, num_tokentypes=0)
    assert "embedding.token_type.weight" not in model.state_dict()
    assert model(batch())["tokens"] > 0


def test_the_short_names_find_the_models() -> None:
    assert lookup("bert", "model") is Bert and lookup("bert_classifier", "model") is BertClassifier


@pytest.mark.parametrize("labels", [1, 3])
def test_the_classifier_scores_the_first_token(labels: int) -> None:
    model = lively(BertClassifier(num_labels=labels, **SMALL)).eval()
    b = batch()
    scores = model(Batch(b.input_ids, padding=b.padding, token_types=b.token_types))
    assert scores.shape == (4, labels)
    target = torch.tensor([0.5, -1.0, 2.0, -100.0]) if labels == 1 else torch.tensor([2, 0, 1, -100])
    b.extra = {"sentence_labels": target}
    sums = model(b)
    if labels == 1:
        wanted = (scores[:3, 0] - target[:3]).square().sum()
    else:
        wanted = functional.cross_entropy(scores[:3], target[:3], reduction="sum")
        assert sums["sentences_correct"] == (scores[:3].argmax(-1) == target[:3]).sum()
    torch.testing.assert_close(sums["loss"], wanted, **CLOSE)
    assert model.counts(b) == {"sentences": 3} and sums["tokens"] == b.padding[:3].sum()


def test_classifier_dropout_belongs_to_the_sample() -> None:
    model = lively(BertClassifier(num_labels=3, **SMALL, **STILL, classifier_dropout_prob=0.5)).train()
    b = batch(keys=True)
    b.extra = {"sentence_labels": torch.tensor([2, 0, 1, 1])}
    parts = sum(model(rows(b, slice(i, i + 1)))["loss"] for i in (3, 1, 0, 2))
    torch.testing.assert_close(parts, model(b)["loss"], **CLOSE)
    assert abs(float(model.eval()(b)["loss"].detach() - parts.detach())) > 1e-3
