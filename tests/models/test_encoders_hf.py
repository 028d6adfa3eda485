"""BERT, RoBERTa and ALBERT against transformers' own models: hidden states, scores, losses, gradients; there and back to the last bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dufu.errors import CheckpointError, ConfigError
from dufu.layers.loss import IGNORE
from dufu.models import Batch
from dufu.models.hf import Fields, complete, describe_folder, family_of
from tests.models.foreign import export_state, import_state
from tests.pool import Ranks

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH, CLOSE = 43, 16, 1e-5
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 0.01,
}  # fmt: skip
BERT = transformers.BertConfig(**COMMON, max_position_embeddings=20, type_vocab_size=3)
ROBERTA = transformers.RobertaConfig(**COMMON, max_position_embeddings=22, type_vocab_size=1)
ALBERT = transformers.AlbertConfig(
    **COMMON, max_position_embeddings=20, embedding_size=12, num_hidden_groups=2, classifier_dropout_prob=0.0
)
KINDS = {
    "BertForPreTraining": BERT, "BertForMaskedLM": BERT, "BertForSequenceClassification": BERT, "BertModel": BERT,
    "RobertaForMaskedLM": ROBERTA, "RobertaForSequenceClassification": ROBERTA, "RobertaModel": ROBERTA,
    "AlbertForPreTraining": ALBERT, "AlbertForMaskedLM": ALBERT,
}  # fmt: skip


def foreign(kind: str) -> Any:
    """Return transformers' model with weights that nothing leaves at zero or one."""
    torch.manual_seed(3)
    model = getattr(transformers, kind)(KINDS[kind]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any, str, dict[str, Any]]:
    theirs = foreign(request.param)
    theirs.save_pretrained(tmp_path)
    described = describe_folder(tmp_path)
    return theirs, import_state(described.target, described.cfg, theirs.state_dict()), described.target, described.cfg


def tokens(padded: bool = True) -> tuple[Tensor, Tensor]:
    """Return token numbers that never are RoBERTa's padding word, and which of them are real."""
    torch.manual_seed(5)
    ids, real = torch.randint(2, VOCAB, (3, LENGTH)), torch.ones(3, LENGTH, dtype=torch.long)
    if padded:
        real[1, 9:] = 0
        real[2, 12:] = 0
        ids[real == 0] = 1
    return ids, real


def test_scores_and_hidden_states_are_theirs(pair: tuple[Any, Any, str, dict[str, Any]]) -> None:
    theirs, ours, _, _ = pair
    ids, real = tokens()
    output = theirs(ids, attention_mask=real)
    expected = getattr(output, "logits", None)
    expected = getattr(output, "prediction_logits", expected)
    expected = output.last_hidden_state if expected is None else expected
    found = ours(Batch(ids, padding=real.bool()))
    if found.dim() == 3:
        found, expected = found[real.bool()], expected[real.bool()]
    assert (found - expected).abs().max() < CLOSE


def test_losses_and_every_gradient_are_theirs(pair: tuple[Any, Any, str, dict[str, Any]]) -> None:
    theirs, ours, target, cfg = pair
    if target.endswith("Features"):
        pytest.skip("hidden states have no loss")
    ids, real = tokens()
    classes = torch.tensor([1, 0, 1])
    if target.endswith("Classifier"):
        batch = Batch(ids, padding=real.bool(), extra={"sentence_labels": classes})
        expected, given = theirs(ids, attention_mask=real, labels=classes).loss * 3, {"loss": 3}
    else:
        labels = torch.where((ids % 3 == 0) & real.bool(), ids, torch.full_like(ids, IGNORE))
        batch, given = Batch(ids, labels, padding=real.bool()), {"lm_loss": int((labels != IGNORE).sum())}
        extra = {}
        if cfg.get("sentence_objective"):
            batch.extra["sentence_labels"] = classes
            name = "sentence_order_label" if "albert" in target else "next_sentence_label"
            extra[name], given["sentence_loss"] = classes, 3
        expected = theirs(ids, attention_mask=real, labels=labels, **extra).loss
    sums = ours(batch)
    loss = sum(sums[name] / count for name, count in given.items())
    expected = expected / 3 if "loss" in given else expected
    assert abs(float(loss.detach()) - float(expected.detach())) < CLOSE
    loss.backward()
    expected.backward()
    gradients = export_state(ours, target, cfg, gradients=True)
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert set(wanted) <= set(gradients)
    for name, value in gradients.items():
        other = wanted.get(name, torch.zeros_like(value))
        assert (value - other).abs().max() < CLOSE, name


def test_weights_and_settings_come_back_to_the_last_bit(pair: tuple[Any, Any, str, dict[str, Any]]) -> None:
    theirs, ours, target, cfg = pair
    state = theirs.state_dict()
    back = export_state(ours, target, cfg)
    assert all(torch.equal(back[name], state[name]) for name in back)
    tied = set(family_of(target).table(target, complete(target, cfg)).copies)
    left = {name for name in state if not name.endswith(("position_ids", "token_type_ids"))} - set(back)
    assert left <= tied
    again_target, again = family_of(target).read(Fields(family_of(target).write(target, complete(target, cfg))))
    assert again_target == target
    assert {**complete(target, again)} == complete(target, cfg)


def test_roberta_counts_positions_of_real_tokens_only() -> None:
    theirs = foreign("RobertaForMaskedLM")
    target, cfg = family_of("dufu.models.roberta.Roberta").read(
        Fields({**theirs.config.to_dict(), "architectures": ["RobertaForMaskedLM"]})
    )
    ours = import_state(target, cfg, theirs.state_dict())
    ids, real = tokens()
    ids, real = ids.flip(1), real.flip(1)  # padded on the left
    found, expected = ours(Batch(ids, padding=real.bool())), theirs(ids, attention_mask=real).logits
    assert (found - expected)[real.bool()].abs().max() < CLOSE


def test_albert_layers_share_weights_but_not_dropout() -> None:
    from dufu.layers.random import token_keys
    from dufu.models import Albert

    model = Albert(
        vocab_size=VOCAB, hidden_layers=2, hidden_size=16, num_attention_heads=2, embedding_size=8, output_dropout_prob=0.5
    )
    one, two = model.layers
    assert one.block is two.block
    hidden = torch.ones(1, 4, 16)
    batch = model.prepare(
        Batch(torch.ones(1, 4, dtype=torch.long), keys=token_keys(1, 0, torch.tensor([0]), torch.arange(4)[None]))
    )
    assert not torch.equal(one(hidden, batch), two(hidden, batch))


_LAYOUT_SIZES = (
    "hidden_layers: 4, hidden_size: 32, num_attention_heads: 4, max_seq_length: 24, embedding_dropout_prob: 0.1, "
    "attention_dropout_prob: 0.1, output_dropout_prob: 0.1"
)
LAID_OUT = {
    "albert": "embedding_size: 16, num_hidden_groups: 2",  # weights that several stages share
    "roberta": "num_tokentypes: 1, sentence_objective: false",
}


@pytest.mark.parametrize("kind", LAID_OUT)
def test_layouts_give_the_numbers_of_one_process(kind: str, ranks: Ranks) -> None:
    from dufu.parity.check import check_config

    own = [f"model={{_target_: {kind}, cfg: {{{_LAYOUT_SIZES}, {LAID_OUT[kind]}}}}}", "train.global_batch_size=4"]
    if kind == "roberta":
        own.append("dataloader.dataset.sentence_pairs=none")
    layouts = ["tp2xpp2", "zero3xpp2", "sp", "cp2"]
    if os.environ.get("DUFU_MODELS") != "all":
        layouts = layouts[:2]
    report = check_config("bert_tiny", own, layouts=",".join(layouts), steps=2, pool=ranks.pool)
    assert report, str(report)


def test_pairs_for_a_model_of_one_segment_are_refused_before_work(ranks: Ranks) -> None:
    from dufu.parity.check import check_config

    own = [f"model={{_target_: roberta, cfg: {{{_LAYOUT_SIZES}, {LAID_OUT['roberta']}}}}}", "train.global_batch_size=4"]
    with pytest.raises(ConfigError, match="sentence_pairs=none"):
        check_config("bert_tiny", own, layouts="tp2", steps=1, pool=ranks.pool)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' changes the numbers"),
        ({"is_decoder": True}, "is_decoder=True"),
        ({"hidden_act": "mish"}, "hidden_act='mish'"),
        ({"novel_attention_gate": 0.5}, "does not know novel_attention_gate=0.5"),
        ({"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering is not built"),
        ({"hidden_size": "big"}, "hidden_size='big'"),
    ],
)
def test_a_setting_that_changes_numbers_is_refused_by_name(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    import json

    fields = {**BERT.to_dict(), "architectures": ["BertForMaskedLM"], **change}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError) as caught:
        describe_folder(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
