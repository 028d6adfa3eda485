"""How a Hugging Face folder makes pictures ready (`preprocessor_config.json`), as settings of the dataset of pictures, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dufu.errors import CheckpointError

FILE = "preprocessor_config.json"
_FILTERS = {2: "bilinear", 3: "bicubic"}  # as Pillow numbers them
_RESCALE = 1 / 255


def _sides(size: Any) -> tuple[int | None, int | None]:
    """Return (side of a square, shorter side) of what a file says of a size; one of them is None."""
    if isinstance(size, int):
        return size, None
    if isinstance(size, Mapping) and "shortest_edge" in size:
        return None, int(size["shortest_edge"])
    if isinstance(size, Mapping) and size.get("height") == size.get("width") and "height" in size:
        return int(size["height"]), None
    return None, None


def _share(values: Mapping[str, Any], where: Path) -> tuple[float | None, int]:
    """Return the share of the shorter side that is looked at (None = the whole picture), and the side of the result."""
    square, shorter = _sides(values.get("size"))
    crop, _ = _sides(values.get("crop_size"))
    if values.get("crop_pct") is not None and shorter is not None:
        return float(values["crop_pct"]), shorter
    if values.get("do_center_crop") and crop is not None:
        edge = shorter if shorter is not None else square
        if edge is not None and edge >= crop:
            return crop / edge, crop
    elif square is not None:
        return None, square
    raise CheckpointError(
        f"{where}: size={values.get('size')!r}, crop_size={values.get('crop_size')!r}: dufu makes squares, of whole pictures or their middle"
    )


def processor_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of `dufu.data.PictureDataset` that a folder's file stands for; none where it has no such file.

    Raises:
        CheckpointError: no JSON object, or a picture is made ready in a way that is not built.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    factor = float(values.get("rescale_factor", _RESCALE)) if values.get("do_rescale", True) else 1.0
    if not math.isclose(factor, _RESCALE, rel_tol=1e-6):
        raise CheckpointError(f"{path}: rescale_factor={factor}: dufu's pictures go from 0 to 1, by 1/255")
    if not values.get("do_resize", True):
        raise CheckpointError(f"{path}: do_resize=false: dufu scales every picture to the model's size")
    share, side = _share(values, path)
    normalised = values.get("do_normalize", True)
    kind = values.get("resample", 2)
    if kind not in _FILTERS:
        raise CheckpointError(f"{path}: resample={kind!r}: 2 (bilinear) and 3 (bicubic) are built")
    return {
        "img_size": side,
        "crop_share": share,
        "resample": _FILTERS[kind],
        "mean": [float(v) for v in values.get("image_mean", [0.5] * 3)] if normalised else [0.0],
        "std": [float(v) for v in values.get("image_std", [0.5] * 3)] if normalised else [1.0],
    }


def folder_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of `dufu.data.PictureDataset` with which a Hugging Face folder's model is evaluated: also its classes' names.

    Raises:
        CheckpointError: as for `processor_settings`.
    """
    classes = named_classes(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    return {**processor_settings(folder), **({} if classes is None else {"classes": classes})}


def named_classes(fields: Mapping[str, Any]) -> list[str] | None:
    """Return the names of the classes in a config.json, in their order; None where it has none, or numbers for names."""
    named = fields.get("id2label")
    if not isinstance(named, Mapping) or all(str(name) == f"LABEL_{i}" for i, name in named.items()):
        return None
    try:
        names = [str(named[key]) for key in sorted(named, key=int)]
    except ValueError:
        return None
    return names if len(set(names)) == len(names) else None


def processor_fields(img_size: int, crop_share: float | None, resample: str, mean: list[float], std: list[float]) -> dict[str, Any]:
    """Return the content of a file for pictures of three colours."""
    square = {"height": img_size, "width": img_size}
    how: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "size": square}
    if crop_share is not None:
        shorter = {"shortest_edge": round(img_size / crop_share)}
        how = {"image_processor_type": "CLIPImageProcessor", "size": shorter, "do_center_crop": True, "crop_size": square}
    return {
        **how,
        "do_resize": True,
        "resample": next(number for number, name in _FILTERS.items() if name == resample),
        "do_rescale": True,
        "rescale_factor": _RESCALE,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": mean * (3 // len(mean)),
        "image_std": std * (3 // len(std)),
    }


__all__ = ["FILE", "folder_settings", "named_classes", "processor_fields", "processor_settings"]
