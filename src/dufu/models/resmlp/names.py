"""The names of ResMLP's weights as its authors publish them (github.com/facebookresearch/deit, `resmlp_models.py`).

transformers has no ResMLP, so there is no Hugging Face folder of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dufu.models.names import Rule, Table, same


def published_names(cfg: Mapping[str, Any]) -> Table:
    """Return the table of names of a state dict of the authors' `resmlp_models`, given complete arguments of ResMLP."""
    rules: list[Rule] = []
    for i in range(int(cfg["depth"])):
        mine, theirs = f"layers.{i}.", f"blocks.{i}."
        for ours, name in (("patch", "1"), ("mlp", "2")):
            rules += [
                same(f"{mine}{ours}_norm.weight", f"{theirs}norm{name}.alpha"),
                same(f"{mine}{ours}_norm.bias", f"{theirs}norm{name}.beta"),
                same(f"{mine}{ours}_scale.weight", f"{theirs}gamma_{name}"),
            ]
        for leaf in ("weight", "bias"):
            rules += [
                same(f"{mine}patches.{leaf}", f"{theirs}attn.{leaf}"),
                same(f"{mine}mlp.expand.{leaf}", f"{theirs}mlp.fc1.{leaf}"),
                same(f"{mine}mlp.contract.{leaf}", f"{theirs}mlp.fc2.{leaf}"),
            ]
    rules += [same("head.norm.weight", "norm.alpha"), same("head.norm.bias", "norm.beta")]
    for leaf in ("weight", "bias"):
        rules += [same(f"embedding.patch.{leaf}", f"patch_embed.proj.{leaf}"), same(f"head.classes.{leaf}", f"head.{leaf}")]
    return Table(tuple(rules))


__all__ = ["published_names"]
