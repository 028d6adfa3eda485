"""T5 and mT5 against transformers' own: scores, loss, every gradient, the way in and out; and what LiBai's T5 got wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dufu.errors import CheckpointError, ConfigError
from dufu.layers.bias import relative_buckets
from dufu.models import T5, Batch
from dufu.models.hf import complete, describe_folder, family_of
from tests.models.foreign import export_state, import_state

TINY: dict[str, Any] = {
    "vocab_size": 99, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "dropout_rate": 0.0, "decoder_start_token_id": 0,
    "initializer_factor": 0.5,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5 v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "t5 tied, not scaled": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False, "tied": True},
    "mt5": {"mt5": True},
}


def theirs(kind: str) -> Any:
    """Return a random transformers model; where its head is not tied, with a weight of its own, as the published v1.1 has."""
    from transformers import MT5Config, MT5ForConditionalGeneration, T5Config, T5ForConditionalGeneration

    settings = {**TINY, **KINDS[kind]}
    many, tied = settings.pop("mt5", False), settings.pop("tied", False)
    untied = (many or settings.get("tie_word_embeddings") is False) and not tied
    torch.manual_seed(3)
    model = MT5ForConditionalGeneration(MT5Config(**settings)) if many else T5ForConditionalGeneration(T5Config(**settings))
    for name, parameter in model.named_parameters():
        if "layer_norm" in name or "relative" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    if untied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.2)
    return model.eval()


def described(model: Any, folder: Path) -> tuple[str, dict[str, Any]]:
    values = json.loads(model.config.to_json_string())
    if not model.config.tie_word_embeddings:
        values.pop("scale_decoder_outputs", None)  # as the published files
    (folder / "config.json").write_text(json.dumps({**values, "architectures": [type(model).__name__]}))
    found = describe_folder(folder)
    return found.target, found.cfg


def sample() -> dict[str, Tensor]:
    """Return tokens of three samples; the second and third are padded, and 0 is a word as well as what pads."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 99, (3, 11), generator=generator)
    padding = torch.arange(11) < torch.tensor([11, 7, 3])[:, None]
    ids[0, 4] = ids[1, 2] = 0
    labels = torch.randint(0, 99, (3, 6), generator=generator)
    labels[1, 4:] = labels[2, 2:] = -100
    start = torch.cat([torch.zeros(3, 1, dtype=torch.int64), labels[:, :-1].clamp(min=0)], 1)
    return {"ids": ids.where(padding, torch.tensor(0)), "padding": padding, "labels": labels, "start": start}


def batch_of(x: dict[str, Tensor], labels: bool = True) -> Batch:
    return Batch(x["ids"], padding=x["padding"], decoder=Batch(x["start"], x["labels"] if labels else None))


@pytest.mark.parametrize("kind", KINDS)
def test_scores_loss_and_all_gradients_are_transformers(kind: str, tmp_path: Path) -> None:
    model = theirs(kind)
    target, cfg = described(model, tmp_path)
    mine, x = import_state(target, cfg, model.state_dict()), sample()
    found = model(input_ids=x["ids"], attention_mask=x["padding"], decoder_input_ids=x["start"], labels=x["labels"])
    with torch.no_grad():
        scores = mine(batch_of(x, labels=False))
    torch.testing.assert_close(scores, found.logits, rtol=1e-4, atol=1e-5)  # fp32, scores up to about 10
    sums = mine(batch_of(x))
    loss = sums["loss"] / sums["tokens"]
    assert float(loss.detach()) == pytest.approx(float(found.loss.detach()), rel=1e-5)
    assert int(sums["tokens"]) == int((x["labels"] != -100).sum()) == mine.counts(batch_of(x))["tokens"]
    loss.backward()
    found.loss.backward()
    gradients = export_state(mine, target, cfg, gradients=True)
    wanted = {name: p.grad for name, p in model.named_parameters()}
    assert wanted.keys() <= gradients.keys() and all(value.any() for value in wanted.values())
    for name, value in wanted.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_config_return_as_they_were(kind: str, tmp_path: Path) -> None:
    model = theirs(kind)
    target, cfg = described(model, tmp_path)
    state = model.state_dict()
    back = export_state(import_state(target, cfg, state), target, cfg)
    copies = family_of(target).table(target, complete(target, cfg)).copies
    assert set(back) | set(copies) == set(state)
    assert all(torch.equal(back[copies.get(name, name)], value) for name, value in state.items())
    fields = family_of(target).write(target, complete(target, cfg))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    again = describe_folder(tmp_path)
    assert (again.target, again.cfg) == (target, cfg)
    assert cfg["gated_mlp"] is (kind != "t5") and cfg["tie_word_embeddings"] is (kind in ("t5", "t5 tied, not scaled"))


def test_transformers_opens_what_is_written_of_an_untied_head(tmp_path: Path) -> None:
    """Its config is written so that old and new versions read the published v1.1: an own head, not scaled."""
    from safetensors.torch import save_file
    from transformers import T5ForConditionalGeneration

    model, x = theirs("t5 v1.1"), sample()
    target, cfg = described(model, tmp_path)
    mine = import_state(target, cfg, model.state_dict())
    (tmp_path / "config.json").write_text(json.dumps(family_of(target).write(target, complete(target, cfg))))
    save_file(export_state(mine, target, cfg), tmp_path / "model.safetensors", {"format": "pt"})
    again = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        scores = again(input_ids=x["ids"], attention_mask=x["padding"], decoder_input_ids=x["start"]).logits
        torch.testing.assert_close(mine(batch_of(x, labels=False)), scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "umt5"}, "model_type='umt5' is no family of dufu's"),
        ({"feed_forward_proj": "gated-mish"}, "feed_forward_proj='gated-mish'"),
        ({"is_decoder": True}, "is_decoder=True changes the numbers"),
        ({"architectures": ["T5EncoderModel"]}, "T5EncoderModel is not built"),
        ({"sparse_step": 2}, "dufu does not know sparse_step=2"),
        ({"d_kv": 0}, "d_kv=0: a whole number of at least 1"),
    ],
)
def test_a_config_that_would_change_the_numbers_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    values = {**json.loads(theirs("t5").config.to_json_string()), **change}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=said):
        describe_folder(tmp_path)


def test_what_hugging_face_cannot_express_is_refused_by_name() -> None:
    family = family_of("dufu.models.t5.T5")
    for cfg, said in (
        ({"attention_dropout_prob": 0.2}, "attention_dropout_prob=0.2"),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, "scale_decoder_outputs=true"),
        ({"gated_mlp": True, "activation": "gelu"}, 'activation="gelu"'),
    ):
        with pytest.raises(ConfigError, match=said):
            family.write("dufu.models.t5.T5", complete("dufu.models.t5.T5", {"vocab_size": 9, **cfg}))


def test_buckets_are_transformers_at_every_distance() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-600, 601)[None]
    for buckets, furthest in ((32, 128), (8, 16), (64, 256), (32, 100)):
        for both in (True, False):
            wanted = T5Attention._relative_position_bucket(distances, both, buckets, furthest)
            assert torch.equal(relative_buckets(distances, buckets, furthest, both), wanted), (buckets, furthest, both)


# LiBai's defects (reference/libai.md 5.3, number 10): masks from the number of the pad token, and arguments lost on the decoder's side.


def test_the_number_of_the_pad_token_means_nothing(tmp_path: Path) -> None:
    """What pads is told by `padding`: the same text padded with any token gives the same scores, and a real 0 is attended to."""
    model = T5(vocab_size=99, hidden_layers=1, hidden_size=32, num_attention_heads=4).eval()
    x = sample()
    with torch.no_grad():
        scores = model(batch_of(x, labels=False))
        other = model(batch_of({**x, "ids": x["ids"].masked_fill(~x["padding"], 57)}, labels=False))
        assert torch.equal(scores, other)
        changed = x["ids"].clone()
        changed[0, 4] = 5  # it was 0
        assert not torch.allclose(model(batch_of({**x, "ids": changed}, labels=False))[0], scores[0])


def test_both_sides_have_the_order_of_norms_and_dropout_that_is_asked_for() -> None:
    from dufu.layers import Dropout

    model = T5(
        vocab_size=99, hidden_layers=1, decoder_layers=2, hidden_size=32, num_attention_heads=4, embedding_dropout_prob=0.1,
        attention_dropout_prob=0.2, activation_dropout_prob=0.3, output_dropout_prob=0.4,
    )  # fmt: skip
    for side in (model.encoder, model.decoder):
        found = {
            name.split(".", 2)[-1] if "layers" in name else name: m.p for name, m in side.named_modules() if isinstance(m, Dropout)
        }
        assert {p for name, p in found.items() if "attention.dropout" in name} == {0.2}
        assert found["embedding.dropout"] == 0.1 and found["norm.dropout"] == 0.4
        assert {p for name, p in found.items() if "mlp.dropout" in name} == {0.3}
        assert not any(layer.block.post_norm for layer in side.layers)


def test_whole_branches_may_be_dropped_where_a_cache_is_used() -> None:
    """LiBai's defect 11: with a cache its layers drop from a tuple."""
    from dufu.layers import KeyValueCache, TransformerLayer

    layer = TransformerLayer(8, 16, 2, drop_path_prob=0.5, is_decoder=True).train()
    x, memory = torch.randn(6, 3, 8), torch.randn(6, 4, 8)
    keys = torch.arange(18).view(6, 3)
    cache, seen = KeyValueCache(), KeyValueCache()
    out = layer(x, keys=keys, cache=cache, memory=memory, memory_cache=seen)
    assert out.shape == x.shape and torch.equal(out, layer(x, keys=keys, memory=memory))
    assert cache.keys is not None and cache.keys.shape[2] == 3 and seen.keys is not None and seen.keys.shape[2] == 4


def test_a_batch_without_a_decoders_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a batch for its decoder"):
        T5(vocab_size=9, hidden_size=8, num_attention_heads=2, hidden_layers=1)(Batch(torch.zeros(1, 3, dtype=torch.int64)))
