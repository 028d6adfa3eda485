"""Named sizes: arguments of SwinTransformer (`swin_…`) and SwinTransformerV2 (`swinv2_…`), by width, patch, window and picture.

They are those of Microsoft's releases; a window that was enlarged for larger pictures says what it was trained with before.
"""

from __future__ import annotations

from typing import Any

_WIDTHS: dict[str, tuple[int, list[int], list[int]]] = {
    "tiny": (96, [2, 2, 6, 2], [3, 6, 12, 24]),
    "small": (96, [2, 2, 18, 2], [3, 6, 12, 24]),
    "base": (128, [2, 2, 18, 2], [4, 8, 16, 32]),
    "large": (192, [2, 2, 18, 2], [6, 12, 24, 48]),
}


def _size(name: str, window: int, image: int, **more: Any) -> dict[str, Any]:
    width, depths, heads = _WIDTHS[name]
    return {
        "img_size": image,
        "patch_size": 4,
        "embed_dim": width,
        "depths": list(depths),
        "num_heads": list(heads),
        "window_size": window,
        **more,
    }


SIZES: dict[str, dict[str, Any]] = {
    **{f"swin_{name}_patch4_window7_224": _size(name, 7, 224) for name in _WIDTHS},
    **{f"swin_{name}_patch4_window12_384": _size(name, 12, 384) for name in ("base", "large")},
    **{f"swinv2_{name}_patch4_window8_256": _size(name, 8, 256) for name in ("tiny", "small", "base")},
    **{f"swinv2_{name}_patch4_window16_256": _size(name, 16, 256) for name in ("tiny", "small", "base")},
    **{
        f"swinv2_{name}_patch4_window12to{window}_192to{image}": _size(name, window, image, pretrained_window_sizes=[12, 12, 12, 6])
        for name in ("base", "large")
        for window, image in ((16, 256), (24, 384))
    },
    **{f"swinv2_{name}_patch4_window12_192": _size(name, 12, 192) for name in ("base", "large")},
    # For trials on small pictures, on a laptop; not published.
    "swin_tiny": {"img_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
}
