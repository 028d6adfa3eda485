"""Named sizes: arguments of ResMLP, those of the paper: S12, S24, S36 and B24 (with patches of 8)."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "resmlp_12_224": {"img_size": 224, "patch_size": 16, "embed_dim": 384, "depth": 12, "init_scale": 0.1},
    "resmlp_24_224": {"img_size": 224, "patch_size": 16, "embed_dim": 384, "depth": 24, "init_scale": 1e-5},
    "resmlp_36_224": {"img_size": 224, "patch_size": 16, "embed_dim": 384, "depth": 36, "init_scale": 1e-6},
    "resmlpB_24_224": {"img_size": 224, "patch_size": 8, "embed_dim": 768, "depth": 24, "init_scale": 1e-6},
    # For trials on small pictures, on a laptop; not published.
    "resmlp_tiny": {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 4, "init_scale": 0.1},
}
