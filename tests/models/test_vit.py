"""ViT against transformers' own, its published sizes, and what its numbers must not depend on."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch.nn import functional

from dufu.errors import CheckpointError, ConfigError, DataError
from dufu.layers.random import token_keys
from dufu.models import Batch, VisionTransformer
from dufu.models.hf import Fields
from dufu.models.vit import SIZES
from dufu.models.vit.hf import FAMILY
from tests.models.foreign import export_state, import_state

CLASSES = 7
SMALL: dict[str, Any] = {"img_size": 12, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2.5}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # fp32 in another order, through two layers


def foreign(classes: int | None = CLASSES, **others: Any) -> Any:
    """Return transformers' model with random weights, none of them zero."""
    from transformers import ViTConfig, ViTForImageClassification, ViTModel

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 40,
        "image_size": 12,
        "patch_size": 4,
    }
    torch.manual_seed(0)
    config = ViTConfig(**sizes, **({} if classes is None else {"num_labels": classes}), **others)
    model = ViTModel(config) if classes is None else ViTForImageClassification(config)
    config.architectures = [type(model).__name__]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def on_disk(model: Any, folder: Any, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors as transformers writes them, or their gradients under the same names."""
    from safetensors.torch import load_file

    if gradients:
        copied = copy.deepcopy(model)
        for parameter, original in zip(copied.parameters(), model.parameters()):
            parameter.data = torch.zeros_like(parameter) if original.grad is None else original.grad
        model = copied
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def described(model: Any) -> tuple[str, dict[str, Any]]:
    """Return our class and arguments of a transformers model; every field of its config.json is known."""
    fields = Fields(json.loads(model.config.to_json_string()))
    found = FAMILY.read(fields)
    fields.done()
    return found


def pictures(samples: int = 4, tokens: int = 10, size: int = 12, keys: bool = False, **extra: Any) -> Batch:
    generator = torch.Generator().manual_seed(3)
    places = torch.arange(tokens).expand(samples, tokens)
    return Batch(
        places,
        keys=token_keys(7, 3, torch.arange(samples), places) if keys else None,
        extra={"pixels": torch.randn(samples, 3, size, size, generator=generator), **extra},
    )


@pytest.mark.parametrize("act", ["gelu", "gelu_new"])
def test_scores_loss_gradients_and_weights_are_those_of_transformers(act: str, tmp_path: Any) -> None:
    theirs = foreign(hidden_act=act).eval()
    target, cfg = described(theirs)
    tensors = on_disk(theirs, tmp_path)
    mine = import_state(target, cfg, tensors)
    batch, labels = pictures(), torch.tensor([0, 6, 3, 3])
    wanted = theirs(batch.extra["pixels"], labels=labels)
    torch.testing.assert_close(mine(batch), wanted.logits, **CLOSE)
    sums = mine(pictures(class_labels=labels))
    torch.testing.assert_close(sums["loss"] / sums["samples"], wanted.loss, **CLOSE)
    assert sums["samples_correct@1"] == (wanted.logits.argmax(-1) == labels).sum()
    assert sums["samples_correct@5"] == sum(int(y in s.topk(5).indices) for s, y in zip(wanted.logits, labels))
    wanted.loss.backward()
    (sums["loss"] / sums["samples"]).backward()
    gradients = export_state(mine, target, cfg, gradients=True)
    for name, value in on_disk(theirs, tmp_path / "gradients", gradients=True).items():
        torch.testing.assert_close(gradients[name], value, **CLOSE, msg=name)
    again = export_state(mine, target, cfg)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], value) for name, value in tensors.items())


def test_a_model_without_classes_gives_hidden_states_and_the_pooled_class_token(tmp_path: Any) -> None:
    theirs = foreign(None).eval()
    target, cfg = described(theirs)
    tensors = on_disk(theirs, tmp_path)
    mine = import_state(target, cfg, tensors)
    wanted, found = theirs(pictures().extra["pixels"]), mine(pictures())
    torch.testing.assert_close(found["hidden"], wanted.last_hidden_state, **CLOSE)
    torch.testing.assert_close(found["pooled"], wanted.pooler_output, **CLOSE)
    assert export_state(mine, target, cfg).keys() == tensors.keys()
    with pytest.raises(ConfigError, match="num_classes=0"):
        mine(pictures(class_labels=torch.zeros(4, dtype=torch.long)))


def test_what_hugging_face_writes_is_read_and_written_back() -> None:
    from dufu.models.hf import complete

    target, cfg = FAMILY.read(Fields({**json.loads(foreign().config.to_json_string()), "hidden_dropout_prob": 0.1}))
    whole = complete(target, cfg)
    assert whole["drop_rate"] == 0.1
    assert complete(*FAMILY.read(Fields(FAMILY.write(target, whole)))) == whole
    with pytest.raises(ConfigError, match="pooler=True"):
        FAMILY.write(target, {**whole, "pooler": True})


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("qkv_bias", False, "qkv_bias=False"),
        ("image_size", [224, 196], "squares"),
        ("hidden_act", "mish", "mish"),
        ("architectures", ["ViTForMaskedImageModeling"], "ViTForMaskedImageModeling"),
        ("a_new_field", 3, "a_new_field"),
    ],
)
def test_a_field_that_would_change_numbers_is_refused_by_name(field: str, value: Any, said: str) -> None:
    fields = Fields({**json.loads(foreign().config.to_json_string()), field: value})
    with pytest.raises(CheckpointError, match=said):
        FAMILY.read(fields)
        fields.done()


def test_the_names_of_the_sizes_tell_the_truth() -> None:
    """LiBai's defect 13: its vit_huge_patch14 has patches of 16."""
    widths = {"tiny": 192, "small": 384, "base": 768, "large": 1024, "huge": 1280, "giant": 1408, "gigantic": 1664}
    depths = {"tiny": 12, "small": 12, "base": 12, "large": 24, "huge": 32, "giant": 40, "gigantic": 48}
    inner = {"giant": 6144, "gigantic": 8192}
    seen = set()
    for name, size in SIZES.items():
        if name == "vit_tiny":
            continue
        _, width, patch, image = name.split("_")
        seen.add(width)
        assert (size["embed_dim"], size["depth"]) == (widths[width], depths[width])
        assert f"patch{size['patch_size']}" == patch and str(size["img_size"]) == image
        assert round(size["embed_dim"] * size["mlp_ratio"]) == inner.get(width, 4 * widths[width])
    assert seen == set(widths) and "vit_huge_patch14_224" in SIZES


@pytest.mark.parametrize(
    ("name", "millions"), [("vit_base_patch16_224", 86.57), ("vit_large_patch16_224", 304.33), ("vit_huge_patch14_224", 632.05)]
)
def test_published_numbers_of_parameters(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = VisionTransformer(**SIZES[name], num_classes=1000)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def lively() -> VisionTransformer:
    torch.manual_seed(1)
    model = VisionTransformer(**SMALL, num_classes=CLASSES, drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


def test_a_batch_in_parts_sums_to_the_whole_with_dropout_on() -> None:
    model, labels = lively(), torch.tensor([0, 6, -100, 3])
    whole = pictures(keys=True, class_labels=labels)
    sums = model(whole)

    def part(rows: slice) -> dict[str, torch.Tensor]:
        extra = {name: value[rows] for name, value in whole.extra.items()}
        return model(Batch(whole.input_ids[rows], keys=whole.keys[rows], extra=extra))

    parts = [part(slice(0, 1)), part(slice(1, 4))]
    for name, value in sums.items():
        torch.testing.assert_close(sum(p[name] for p in parts), value, **CLOSE)
    assert sums["samples"] == 3 and model.counts(whole) == {"samples": 3}
    still = model.eval()(pictures(class_labels=labels))
    assert not torch.allclose(still["loss"], sums["loss"], rtol=1e-3)  # so dropout was on


def test_mixed_labels_share_the_loss_and_smoothing_is_for_training_alone() -> None:
    model = VisionTransformer(**SMALL, num_classes=CLASSES, label_smoothing=0.1)
    first, other, share = torch.tensor([0, 1, 2, 3]), torch.tensor([4, 5, 6, 0]), torch.tensor([0.7, 0.5, 1.0, 0.9])
    batch = pictures(class_labels=first, mixed_labels=other, mixed_share=share)
    scores = model.eval()(pictures())
    soft = share[:, None] * functional.one_hot(first, CLASSES) + (1 - share[:, None]) * functional.one_hot(other, CLASSES)
    torch.testing.assert_close(model(batch)["loss"], functional.cross_entropy(scores, soft, reduction="sum"), **CLOSE)
    smooth = functional.cross_entropy(scores, soft, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(model.train()(batch)["loss"], smooth, **CLOSE)


def test_a_picture_of_another_size_and_a_wrong_number_of_tokens_are_one_clear_line() -> None:
    model = VisionTransformer(**SMALL, num_classes=CLASSES)
    with pytest.raises(ConfigError, match="16 x 16"):
        model(pictures(size=16))
    with pytest.raises(DataError, match="samples of 9 tokens, but img_size=12 and patch_size=4 make 10"):
        model(pictures(tokens=9))
    with pytest.raises(ConfigError, match="without pixels"):
        model(Batch(torch.zeros(1, 10, dtype=torch.long)))
    with pytest.raises(ConfigError, match="num_classes is not set"):
        VisionTransformer(**SMALL)
    with pytest.raises(ConfigError, match="not a multiple of patch_size 5"):
        VisionTransformer(**{**SMALL, "patch_size": 5}, num_classes=2)
