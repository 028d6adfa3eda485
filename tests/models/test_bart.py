"""BART and mBART against transformers' own: scores, loss, every gradient, the way in and out, greedy answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dufu.errors import CheckpointError, ConfigError, LayoutError
from dufu.generation.decoding import Decoding
from dufu.generation.seq2seq import decode_target
from dufu.models import Bart, Batch
from dufu.models.hf import complete, describe_folder, family_of
from tests.models.foreign import export_state, import_state

TINY: dict[str, Any] = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40,
    "encoder_attention_heads": 4, "decoder_attention_heads": 2, "max_position_embeddings": 24, "dropout": 0.0, "pad_token_id": 1,
    "init_std": 0.2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "bart": {},
    "bart, scaled": {"scale_embedding": True, "activation_function": "relu"},
    "mbart": {},
}


def theirs(kind: str) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration, MBartConfig, MBartForConditionalGeneration

    torch.manual_seed(3)
    settings = {**TINY, **KINDS[kind]}
    if kind == "mbart":
        model = MBartForConditionalGeneration(MBartConfig(**settings, decoder_start_token_id=2))
    else:
        model = BartForConditionalGeneration(BartConfig(**settings))
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, float(name.endswith("norm.weight")), 0.2)
    model.final_logits_bias.normal_(0.0, 0.3)
    model.generation_config.forced_eos_token_id = None
    return model.eval()


def described(model: Any, folder: Path) -> tuple[str, dict[str, Any]]:
    model.config.architectures = [type(model).__name__]
    (folder / "config.json").write_text(model.config.to_json_string())
    found = describe_folder(folder)
    return found.target, found.cfg


def sample() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    padding = torch.arange(11) < torch.tensor([11, 7, 3])[:, None]
    ids = torch.randint(2, 99, (3, 11), generator=generator).where(padding, torch.tensor(1))
    labels = torch.randint(2, 99, (3, 6), generator=generator)
    labels[1, 4:] = labels[2, 2:] = -100
    start = torch.cat([torch.full((3, 1), 2), labels[:, :-1].masked_fill(labels[:, :-1] < 0, 1)], 1)
    return {"ids": ids, "padding": padding, "labels": labels, "start": start}


def batch_of(x: dict[str, Tensor], labels: bool = True) -> Batch:
    return Batch(x["ids"], padding=x["padding"], decoder=Batch(x["start"], x["labels"] if labels else None))


@pytest.mark.parametrize("kind", KINDS)
def test_scores_loss_and_all_gradients_are_transformers(kind: str, tmp_path: Path) -> None:
    model = theirs(kind)
    target, cfg = described(model, tmp_path)
    mine, x = import_state(target, cfg, model.state_dict()), sample()
    found = model(input_ids=x["ids"], attention_mask=x["padding"], decoder_input_ids=x["start"], labels=x["labels"])
    with torch.no_grad():
        torch.testing.assert_close(mine(batch_of(x, labels=False)), found.logits, rtol=1e-4, atol=1e-5)
    sums = mine(batch_of(x))
    loss = sums["loss"] / sums["tokens"]
    assert float(loss.detach()) == pytest.approx(float(found.loss.detach()), rel=1e-5)
    loss.backward()
    found.loss.backward()
    gradients = named_gradients(mine, target, cfg)
    for name, parameter in model.named_parameters():
        # The bias of keys adds the same to all scores of a query: its gradient is rounding.
        if name.endswith("k_proj.bias"):
            continue
        wanted = parameter.grad
        assert wanted.any(), name
        torch.testing.assert_close(gradients[name], wanted, rtol=1e-4, atol=2e-5 * float(wanted.abs().max()), msg=name)


def named_gradients(model: Any, target: str, cfg: dict[str, Any]) -> dict[str, Tensor]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # what is not trained has none
    return export_state(model, target, cfg, gradients=True)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_config_return_as_they_were(kind: str, tmp_path: Path) -> None:
    model = theirs(kind)
    target, cfg = described(model, tmp_path)
    state = model.state_dict()
    back = export_state(import_state(target, cfg, state), target, cfg)
    copies = family_of(target).table(target, complete(target, cfg)).copies
    assert set(back) | set(copies) == set(state)
    assert all(torch.equal(back[copies.get(name, name)], value) for name, value in state.items())
    (tmp_path / "config.json").write_text(json.dumps(family_of(target).write(target, complete(target, cfg))))
    again = describe_folder(tmp_path)
    assert (again.target, again.cfg) == (target, cfg)
    assert cfg["apply_residual_post_layernorm"] is (kind != "mbart")


def test_a_file_of_the_bare_model_has_no_bias_of_scores(tmp_path: Path) -> None:
    """As facebook/bart-large was published: names without the prefix, neither head nor bias."""
    model = theirs("bart")
    target, cfg = described(model, tmp_path)
    mine = import_state(target, cfg, model.model.state_dict())
    assert not mine.head.logits.bias.any()
    assert torch.equal(mine.encoder.embedding.word.weight, model.model.shared.weight)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_transformers(kind: str, cache: bool, tmp_path: Path) -> None:
    prompts, ends = [[0, 17, 33, 2, 90, 41, 2], [0, 44, 2], [0, 7, 7, 60, 2]], (61, 40)
    model = theirs(kind)
    with torch.no_grad():  # so that an answer does not only repeat its last token
        model.model.decoder.embed_positions.weight *= 3
        for layer in model.model.decoder.layers:
            for linear in (layer.fc2, layer.encoder_attn.out_proj):
                linear.weight *= 0.3
                linear.bias.zero_()
    target, cfg = described(model, tmp_path)
    mine = import_state(target, cfg, model.state_dict())
    wanted = []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=list(ends), use_cache=False)
        tokens = out[0, 1:].tolist()
        wanted.append(tokens[: next((i for i, token in enumerate(tokens) if token in ends), None)])
    decoding = Decoding(max_new_tokens=12, end_tokens=ends, use_cache=cache)
    assert decode_target(mine, prompts, decoding, torch.device("cpu"), start=2) == wanted
    assert any(len(set(row)) > 1 for row in wanted) and (kind == "mbart" or len({len(row) for row in wanted}) > 1), wanted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"normalize_before": True}, "normalize_before=True changes the numbers"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.1"),
        ({"architectures": ["BartForQuestionAnswering"]}, "BartForQuestionAnswering is not built"),
        ({"model_type": "pegasus"}, "model_type='pegasus' is no family"),
    ],
)
def test_a_config_that_would_change_the_numbers_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    values = {**json.loads(theirs("bart").config.to_json_string()), **change}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=said):
        describe_folder(tmp_path)


def test_more_tokens_than_positions_are_refused_on_either_side() -> None:
    model = Bart(vocab_size=9, hidden_size=8, num_attention_heads=2, hidden_layers=1, max_seq_length=4).eval()
    short, long = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64)
    for batch in (Batch(long, decoder=Batch(short)), Batch(short, decoder=Batch(long))):
        with pytest.raises(LayoutError, match="5 tokens do not fit into max_seq_length=4"):
            model(batch)
    with pytest.raises(ConfigError, match="the prompt has 5 tokens, but the encoder has 4 positions"):
        decode_target(model, [[1] * 5], Decoding(), torch.device("cpu"), start=2)
    with pytest.raises(ConfigError, match="max_new_tokens=5, but at most 4"):
        decode_target(model, [[1]], Decoding(max_new_tokens=5), torch.device("cpu"), start=2)


def test_both_sides_have_the_order_of_norms_that_is_asked_for() -> None:
    """LiBai's defect 10 (reference/libai.md 5.3): its decoder ignores the order after the branches."""
    for post in (True, False):
        model = Bart(
            vocab_size=9, hidden_size=8, num_attention_heads=2, hidden_layers=2, apply_residual_post_layernorm=post
        )  # fmt: skip
        for side in (model.encoder, model.decoder):
            assert all(layer.block.post_norm is post for layer in side.layers) and (side.norm is None) is post
