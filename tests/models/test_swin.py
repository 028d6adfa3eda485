"""Swin and Swin V2 against transformers' own, their published sizes, and what their numbers must not depend on."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.errors import CheckpointError, ConfigError, LayoutError
from dufu.layers.random import token_keys
from dufu.layers.window import WindowGrid
from dufu.models import Batch, SwinTransformer, SwinTransformerV2
from dufu.models.hf import Fields, complete
from dufu.models.swin import SIZES
from dufu.models.swin.hf import FAMILY
from dufu.parity.check import check_config
from tests.models.foreign import export_state, import_state
from tests.models.pictures import write_noise
from tests.pool import Ranks

CLASSES = 7
CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # fp32 in another order, through four layers
# 12 x 12 patches, then 6 x 6: windows of 4 tile the first grid, and the second one is padded; the shift masks both
THEIRS: dict[str, Any] = {
    "image_size": 24, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "mlp_ratio": 2.0,
    "num_labels": CLASSES,
}  # fmt: skip
OURS: dict[str, Any] = {
    "img_size": 24, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "mlp_ratio": 2.0,
    "num_classes": CLASSES,
}  # fmt: skip
BOTH = pytest.mark.parametrize("version", [1, 2])


def foreign(version: int, bare: bool = False, **others: Any) -> Any:
    """Return transformers' model with random weights, none of them zero, in evaluation mode."""
    import transformers as t

    kind = "Swin" if version == 1 else "Swinv2"
    config = getattr(t, f"{kind}Config")(**{**THEIRS, **others})
    torch.manual_seed(0)
    model = getattr(t, f"{kind}Model" if bare else f"{kind}ForImageClassification")(config)
    config.architectures = [type(model).__name__]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def on_disk(model: Any, folder: Path, gradients: bool = False) -> dict[str, torch.Tensor]:
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
    fields = Fields(json.loads(model.config.to_json_string()))
    found = FAMILY.read(fields)
    fields.done()
    return found


def pictures(samples: int = 3, keys: bool = False, **extra: Any) -> Batch:
    generator = torch.Generator().manual_seed(3)
    places = torch.arange(144).expand(samples, 144)
    return Batch(
        places,
        keys=token_keys(7, 3, torch.arange(samples), places) if keys else None,
        extra={"pixels": torch.randn(samples, 3, 24, 24, generator=generator), **extra},
    )


@pytest.mark.parametrize(
    ("version", "others"),
    [
        (1, {}), (1, {"qkv_bias": False, "use_absolute_embeddings": True}), (1, {"window_size": 6}),
        (2, {}), (2, {"qkv_bias": False}), (2, {"window_size": 8, "pretrained_window_sizes": [4, 3]}),
    ],
)  # fmt: skip
def test_scores_loss_gradients_and_weights_are_those_of_transformers(version: int, others: dict[str, Any], tmp_path: Path) -> None:
    theirs = foreign(version, **others)
    target, cfg = described(theirs)
    tensors = on_disk(theirs, tmp_path)
    mine = import_state(target, cfg, tensors)
    labels = torch.tensor([0, 6, 3])
    wanted = theirs(pictures().extra["pixels"], labels=labels)
    torch.testing.assert_close(mine(pictures()), wanted.logits, **CLOSE)
    sums = mine(pictures(class_labels=labels))
    torch.testing.assert_close(sums["loss"] / sums["samples"], wanted.loss, **CLOSE)
    wanted.loss.backward()
    (sums["loss"] / sums["samples"]).backward()
    gradients = export_state(mine, target, cfg, gradients=True)
    for name, value in on_disk(theirs, tmp_path / "gradients", gradients=True).items():
        torch.testing.assert_close(gradients[name], value, **CLOSE, msg=name)
    again = export_state(mine, target, cfg)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], value) for name, value in tensors.items())
    whole = complete(target, cfg)
    assert complete(*FAMILY.read(Fields(FAMILY.write(target, whole)))) == whole


@BOTH
def test_a_model_without_classes_gives_patches_and_their_mean(version: int, tmp_path: Path) -> None:
    theirs = foreign(version, bare=True)
    target, cfg = described(theirs)
    mine = import_state(target, cfg, on_disk(theirs, tmp_path))
    wanted, found = theirs(pictures().extra["pixels"]), mine(pictures())
    torch.testing.assert_close(found["hidden"], wanted.last_hidden_state, **CLOSE)
    torch.testing.assert_close(found["pooled"], wanted.pooler_output, **CLOSE)


@pytest.mark.parametrize(("side", "window", "shift"), [(8, 4, 0), (8, 4, 2), (6, 4, 2), (3, 4, 2)])
def test_windows_are_cut_and_joined_without_loss(side: int, window: int, shift: int) -> None:
    grid = WindowGrid(side, window, shift)
    x = torch.randn(2, side**2, 5)
    cut = grid.cut(x)
    assert cut.shape == (2 * grid.across**2, grid.window**2, 5)
    assert torch.equal(grid.join(cut), x)
    assert torch.equal(grid.join(grid.cut(x[..., 0]).unsqueeze(-1))[..., 0], x[..., 0])
    assert (grid.mask(2, x.device) is None) == (side <= window or shift == 0)


def test_a_shift_lets_no_patch_attend_across_the_edge_of_the_picture() -> None:
    grid = WindowGrid(8, 4, 2)
    rows = torch.arange(8).repeat_interleave(8)[None]
    found, mask = grid.cut(rows), grid.mask(1, rows.device)
    assert mask is not None and mask.allowed is not None
    near = (found[:, :, None] - found[:, None, :]).abs() < 4
    assert bool((near | ~mask.allowed[:, 0]).all()) and not bool(mask.allowed.all())


def test_the_names_of_the_sizes_tell_the_truth() -> None:
    """LiBai's defect 13: its swin_base of pictures of 384 has windows of 7."""
    widths = {"tiny": 96, "small": 96, "base": 128, "large": 192}
    depths = {"tiny": [2, 2, 6, 2], "small": [2, 2, 18, 2], "base": [2, 2, 18, 2], "large": [2, 2, 18, 2]}
    assert SIZES["swin_base_patch4_window12_384"]["window_size"] == 12
    for name, size in SIZES.items():
        if name == "swin_tiny":
            continue
        _, width, patch, *rest = name.split("_")
        window, image = rest[0].removeprefix("window").split("to")[-1], rest[-1].split("to")[-1]
        assert (size["embed_dim"], size["depths"]) == (widths[width], depths[width])
        assert patch == f"patch{size['patch_size']}" and int(window) == size["window_size"] and int(image) == size["img_size"]
        assert size["embed_dim"] // size["num_heads"][0] == 32


@pytest.mark.parametrize(
    ("name", "millions"),
    [("swin_tiny_patch4_window7_224", 28.29), ("swin_base_patch4_window12_384", 87.90), ("swinv2_tiny_patch4_window8_256", 28.35)],
)
def test_published_numbers_of_parameters(name: str, millions: float) -> None:
    make = SwinTransformerV2 if name.startswith("swinv2") else SwinTransformer
    with torch.device("meta"):
        model = make(**SIZES[name], num_classes=1000)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_stages_of_a_pipeline_count_the_patches_that_each_layer_sees() -> None:
    """A layer of a later stage has four times the weights and a quarter of the patches: the work of each is nearly the same."""
    from dufu.parallel.layout import ParallelLayout
    from dufu.parallel.stages import assign_stages

    with torch.device("meta"):
        model = SwinTransformer(**SIZES["swin_base_patch4_window7_224"], num_classes=1000)
    stages = assign_stages(model, model.units(), ParallelLayout(pipeline=2))
    assert 11 <= sum(stage == 0 for name, stage in stages.items() if name.startswith("layers")) <= 13


@BOTH
def test_a_batch_in_parts_sums_to_the_whole_with_dropout_on(version: int) -> None:
    torch.manual_seed(1)
    make = SwinTransformer if version == 1 else SwinTransformerV2
    model = make(**OURS, drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.3).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    whole = pictures(keys=True, class_labels=torch.tensor([0, 6, -100]))
    assert whole.keys is not None
    sums, parts = model(whole), []
    for row in range(3):
        extra = {name: value[row : row + 1] for name, value in whole.extra.items()}
        parts.append(model(Batch(whole.input_ids[row : row + 1], keys=whole.keys[row : row + 1], extra=extra)))
    for name, value in sums.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value, **CLOSE)
    assert not torch.allclose(model.eval()(whole)["loss"], sums["loss"], rtol=1e-3)


SMALL = ["model.cfg.img_size=12", "model.cfg.embed_dim=16", "model.cfg.window_size=4", "model.cfg.drop_path_rate=0.2", "model.cfg.drop_rate=0.1",
         "model.cfg.attn_drop_rate=0.1"]  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
def test_layouts_give_the_numbers_of_one_process(version: int, ranks: Ranks, tmp_path: Path) -> None:
    noise = str(write_noise(tmp_path / "noise.npz"))
    layouts = (
        "tp2xpp2"
        if os.environ.get("DUFU_MODELS") != "all"
        else "dp2,tp2,pp2,tp2xpp2,zero3,zero3xtp2:recompute,dp2:selective,dp2:O1"
    )
    # Branches that begin as nothing, as V2's do, would compare nothing; norms of almost nothing would compare noise.
    name, more = (
        ("swinv2_tiny", ["model.cfg.init_scale=0.1", "model.cfg.initializer_range=0.2"]) if version == 2 else ("swin_tiny", [])
    )
    report = check_config(name, [*SMALL, *more], layouts=layouts, data=[noise], steps=2, pool=ranks.pool)
    assert report.agrees, str(report)


@pytest.mark.parametrize("layout", ["sp", "cp2"])
def test_positions_that_windows_mix_are_not_shared(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    noise = str(write_noise(tmp_path / "noise.npz"))
    with pytest.raises(LayoutError, match="SwinTransformer mixes positions in other ways"):
        check_config("swin_tiny", SMALL, layouts=layout, data=[noise], steps=1, pool=ranks.pool)


def test_sizes_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="a multiple of 16, such as 32"):
        SwinTransformer(**{**OURS, "img_size": 36, "depths": [1, 1, 1], "num_heads": [1, 1, 1], "patch_size": 4})
    with pytest.raises(ConfigError, match="one number of at least 1 for each stage"):
        SwinTransformer(**{**OURS, "num_heads": [2]})
    with pytest.raises(ConfigError, match="pretrained_window_sizes"):
        SwinTransformerV2(**OURS, pretrained_window_sizes=[4])
    fields = json.loads(foreign(1).config.to_json_string())
    with pytest.raises(CheckpointError, match=r"window_size=8 is larger than the last stage's grid of 6"):
        FAMILY.read(Fields({**fields, "window_size": 8}))
