"""Named sizes: arguments of CLIP, those of OpenAI's releases with transformers as both towers."""

from __future__ import annotations

from typing import Any


def _size(patch: int, image: int, width: int, layers: int, text_width: int, embed_dim: int) -> dict[str, Any]:
    return {
        "img_size": image,
        "patch_size": patch,
        "vision_width": width,
        "vision_layers": layers,
        "vision_heads": width // 64,
        "transformer_width": text_width,
        "transformer_layers": 12,
        "transformer_heads": text_width // 64,
        "embed_dim": embed_dim,
        "context_length": 77,
        "vocab_size": 49408,
    }


SIZES: dict[str, dict[str, Any]] = {
    "clip_vit_base_patch32": _size(32, 224, 768, 12, 512, 512),
    "clip_vit_base_patch16": _size(16, 224, 768, 12, 512, 512),
    "clip_vit_large_patch14": _size(14, 224, 1024, 24, 768, 768),
    "clip_vit_large_patch14_336": _size(14, 336, 1024, 24, 768, 768),
}
