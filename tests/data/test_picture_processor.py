"""What a Hugging Face folder says of making pictures ready is what the dataset of pictures does, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dufu.data.augment import Augmentation
from dufu.data.picture_processor import named_classes, processor_fields, processor_settings
from dufu.errors import CheckpointError

VIT = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}, "resample": 2, "do_resize": True,
       "do_rescale": True, "do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}  # fmt: skip
CLIP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "resample": 3, "do_resize": True, "do_center_crop": True,
        "crop_size": {"height": 16, "width": 16}, "do_rescale": True, "do_normalize": True, "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.2, 0.3, 0.4]}  # fmt: skip


def written(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("fields", [VIT, CLIP, {**VIT, "resample": 3, "do_normalize": False}])
def test_a_picture_is_made_ready_as_transformers_does(fields: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    settings = processor_settings(written(tmp_path, fields))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    mine = Augmentation(
        settings["img_size"],
        3,
        tuple(settings["mean"]),
        tuple(settings["std"]),
        settings["crop_share"],
        resample=settings["resample"],
    ).plain(image)
    theirs = AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt")["pixel_values"][0]
    # Bytes rounded another way; the middle cut out after scaling rather than before.
    torch.testing.assert_close(
        torch.from_numpy(mine), theirs, rtol=0, atol=2.5 / 255 / min(settings["std"]) if fields is not CLIP else 0.2
    )


@pytest.mark.parametrize("share", [None, 0.875])
def test_settings_are_written_and_read_back(share: float | None, tmp_path: Path) -> None:
    found = processor_settings(written(tmp_path, processor_fields(224, share, "bilinear", [0.1, 0.2, 0.3], [0.5])))
    assert found == {"img_size": 224, "crop_share": share, "resample": "bilinear", "mean": [0.1, 0.2, 0.3], "std": [0.5] * 3}
    assert processor_settings(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"resample": 1}, "resample=1"), ({"rescale_factor": 1.0}, "rescale_factor=1.0"), ({"do_resize": False}, "do_resize=false"),
        ({"size": {"height": 16, "width": 20}}, "dufu makes squares"), ({"do_rescale": False}, "rescale_factor=1.0"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        processor_settings(written(tmp_path, {**VIT, **changed}))


def test_classes_have_the_names_and_the_order_of_the_config() -> None:
    assert named_classes({"id2label": {"1": "dog", "0": "cat", "10": "owl", "2": "eel"}}) == ["cat", "dog", "eel", "owl"]
    assert named_classes({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}) is None and named_classes({}) is None
