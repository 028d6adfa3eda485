"""ResMLP against one written down plainly, its published sizes and names, and its layouts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from dufu.errors import ConfigError, LayoutError
from dufu.models import Batch, ResMLP
from dufu.models.hf import complete, family_of
from dufu.models.resmlp import SIZES
from dufu.models.resmlp.names import published_names
from dufu.parity.check import check_config
from tests.models.foreign import shapes_of
from tests.models.pictures import write_noise
from tests.pool import Ranks

SMALL: dict[str, Any] = {"img_size": 12, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_classes": 7, "init_scale": 0.1}
TARGET = "dufu.models.resmlp.ResMLP"


def plain(w: dict[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    """Return the scores, from weights by their published names."""
    x = functional.conv2d(pixels, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=4).flatten(2).transpose(1, 2)
    for i in range(2):
        b = f"blocks.{i}."
        y = w[f"{b}norm1.alpha"] * x + w[f"{b}norm1.beta"]
        y = functional.linear(y.transpose(1, 2), w[f"{b}attn.weight"], w[f"{b}attn.bias"]).transpose(1, 2)
        x = x + w[f"{b}gamma_1"] * y
        y = w[f"{b}norm2.alpha"] * x + w[f"{b}norm2.beta"]
        y = functional.gelu(functional.linear(y, w[f"{b}mlp.fc1.weight"], w[f"{b}mlp.fc1.bias"]))
        x = x + w[f"{b}gamma_2"] * functional.linear(y, w[f"{b}mlp.fc2.weight"], w[f"{b}mlp.fc2.bias"])
    x = (w["norm.alpha"] * x + w["norm.beta"]).mean(1)
    return functional.linear(x, w["head.weight"], w["head.bias"])


def test_scores_are_those_of_the_formula_by_the_published_names() -> None:
    torch.manual_seed(0)
    model = ResMLP(**SMALL).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    table, values = published_names(complete(TARGET, SMALL)), dict(model.named_parameters())
    assert set(table.foreign_shapes(shapes_of(model))) == {rule.parts[0].name for rule in table.rules}
    weights = {rule.parts[0].name: values[rule.ours].detach() for rule in table.rules}
    assert len(weights) == len(values)
    pixels, labels = torch.randn(3, 3, 12, 12), torch.tensor([1, 2, 6])
    batch = Batch(torch.arange(9).expand(3, 9), extra={"pixels": pixels})
    torch.testing.assert_close(model(batch), plain(weights, pixels), rtol=1e-5, atol=1e-5)
    scored = Batch(batch.input_ids, extra={"pixels": pixels, "class_labels": labels})
    wanted = functional.cross_entropy(plain(weights, pixels), labels, reduction="sum")
    torch.testing.assert_close(model(scored)["loss"], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "millions"), [("resmlp_12_224", 15.35), ("resmlp_24_224", 30.02), ("resmlp_36_224", 44.69), ("resmlpB_24_224", 129.14)]
)
def test_published_numbers_of_parameters(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = ResMLP(**SIZES[name], num_classes=1000)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


SETTINGS = ["model.cfg.img_size=12", "model.cfg.embed_dim=16", "model.cfg.drop_rate=0.1", "model.cfg.drop_path_rate=0.2"]


def test_layouts_give_the_numbers_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    noise = str(write_noise(tmp_path / "noise.npz"))
    layouts = "tp2xpp2" if os.environ.get("DUFU_MODELS") != "all" else "dp2,tp2,pp2,tp2xpp2,zero3"
    report = check_config("resmlp_tiny", SETTINGS, layouts=layouts, data=[noise], steps=2, pool=ranks.pool)
    assert report.agrees, str(report)


def test_what_resmlp_has_not_is_said_by_name(ranks: Ranks, tmp_path: Path) -> None:
    noise = str(write_noise(tmp_path / "noise.npz"))
    with pytest.raises(LayoutError, match="ResMLP mixes positions in other ways"):
        check_config("resmlp_tiny", SETTINGS, layouts="sp", data=[noise], steps=1, pool=ranks.pool)
    with pytest.raises(ConfigError, match=r"ResMLP has no counterpart in Hugging Face's formats"):
        family_of(TARGET)
    with pytest.raises(ConfigError, match=r"num_classes=0: at least 1$"):
        ResMLP(**{**SMALL, "num_classes": 0})
