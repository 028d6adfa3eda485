"""CLIP against transformers' own: both towers, their comparison, names in both directions, and layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.errors import CheckpointError, LayoutError, NotBuiltError
from dufu.models import CLIP, Batch
from dufu.models.clip import SIZES
from dufu.models.clip.hf import FAMILY
from dufu.models.hf import Fields, complete
from tests.models.foreign import export_state, import_state
from tests.pool import Ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # fp32 in another order
END = 29
OURS: dict[str, Any] = {
    "embed_dim": 20, "img_size": 12, "patch_size": 4, "vision_width": 24, "vision_layers": 2, "vision_heads": 2, "context_length": 12,
    "vocab_size": 30, "transformer_width": 16, "transformer_layers": 3, "transformer_heads": 4, "initializer_range": 0.2,
}  # fmt: skip


def foreign(end: int = END) -> Any:
    """Return transformers' model with random weights, none of them zero, in evaluation mode."""
    from transformers import CLIPConfig, CLIPModel

    both = {"num_attention_heads": 2, "num_hidden_layers": 2}
    config = CLIPConfig(
        text_config={
            **both, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 30, "max_position_embeddings": 12, "eos_token_id": end,
            "bos_token_id": 28,
        },
        vision_config={**both, "hidden_size": 24, "intermediate_size": 40, "image_size": 12, "patch_size": 4},
        projection_dim=20,
    )  # fmt: skip
    torch.manual_seed(0)
    model = CLIPModel(config)
    config.architectures = ["CLIPModel"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def read(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    given = Fields(fields)
    found = FAMILY.read(given)
    given.done()
    return found


def made_up(pictures: int = 4, texts: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 28, (texts, 9), generator=generator)
    ids[torch.arange(texts), torch.arange(texts) + 4] = END
    return Batch(ids, extra={"pixels": torch.randn(pictures, 3, 12, 12, generator=generator)})


@pytest.mark.parametrize("end", [END, 2])
def test_features_scores_gradients_and_weights_are_those_of_transformers(end: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    theirs = foreign(end)
    target, cfg = read(json.loads(theirs.config.to_json_string()))
    assert cfg["end_token"] == (None if end == 2 else END)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    mine = import_state(target, cfg, tensors)
    batch = made_up()
    wanted, found = theirs(input_ids=batch.input_ids, pixel_values=batch.extra["pixels"]), mine(batch)
    torch.testing.assert_close(found["picture"], wanted.image_embeds, **CLOSE)
    torch.testing.assert_close(found["text"], wanted.text_embeds, **CLOSE)
    torch.testing.assert_close(found["scores"], wanted.logits_per_image, rtol=1e-5, atol=1e-4)  # cosines times about 14
    wanted.logits_per_image.square().mean().backward()
    found["scores"].square().mean().backward()
    gradients = export_state(mine, target, cfg, gradients=True)
    for name, value in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-4, atol=1e-4, msg=name)
    again = export_state(mine, target, cfg)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], value) for name, value in tensors.items())
    whole = complete(target, cfg)
    assert complete(*read(FAMILY.write(target, whole))) == whole


def test_a_folder_that_transformers_wrote_long_ago_is_read() -> None:
    """`text_config_dict` takes the place of `text_config`, and every field of a config is repeated in both towers."""
    fields = json.loads(foreign().config.to_json_string())
    old = {
        "add_cross_attention": False,
        "chunk_size_feed_forward": 0,
        "dropout": 0.0,
        "is_decoder": False,
        "tie_word_embeddings": True,
    }
    fields["text_config_dict"] = {**fields["text_config"], **old, "num_attention_heads": 4}
    fields["vision_config_dict"] = None
    fields["vision_config"].update(old)
    assert read(fields)[1]["transformer_heads"] == 4
    with pytest.raises(CheckpointError, match="a_new_field"):
        read({**fields, "vision_config": {**fields["vision_config"], "a_new_field": 1}})
    with pytest.raises(CheckpointError, match="hidden_act differs"):
        read({**fields, "vision_config": {**fields["vision_config"], "hidden_act": "gelu"}})


@pytest.mark.parametrize(("name", "millions"), [("clip_vit_base_patch32", 151.28), ("clip_vit_large_patch14", 427.62)])
def test_published_numbers_of_parameters(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = CLIP(**SIZES[name])
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def laid_out(tensor: int, pipeline: int, sequence: bool = False) -> tuple[dict[str, torch.Tensor], int]:
    from dufu.optim import get_default_optimizer_params
    from dufu.parallel.build import distribute
    from dufu.parallel.layout import ParallelLayout
    from dufu.parallel.process import choose_device, join

    layout = ParallelLayout(tensor=tensor, pipeline=pipeline, sequence=sequence)
    d = distribute(lambda: CLIP(**OURS), join(layout, choose_device("cpu")), get_default_optimizer_params, seed=5)
    d.model.eval()
    with torch.no_grad():
        return d.runner.forward_everywhere(made_up()), sum(e.tensor.numel() for e in d.store.entries)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_layouts_give_the_scores_of_one_process(tensor: int, pipeline: int, ranks: Ranks) -> None:
    whole, held = ranks(1, laid_out, 1, 1)[0]
    for part, own in ranks(tensor * pipeline, laid_out, tensor, pipeline):
        assert own < 0.75 * held
        for name, value in whole.items():
            torch.testing.assert_close(part[name], value, rtol=1e-5, atol=1e-4)


def refused() -> str:
    try:
        laid_out(2, 1, True)
    except LayoutError as error:
        return str(error)
    return "accepted"


def test_what_is_not_built_is_said_by_name(ranks: Ranks, tmp_path: Path) -> None:
    from dufu.training.run import train
    from tests.models.pictures import write_noise

    assert "CLIP mixes positions in other ways" in ranks(2, refused)[0]
    labelled = made_up()
    labelled.extra["class_labels"] = torch.zeros(4)
    with pytest.raises(NotBuiltError, match="contrastive loss"):
        CLIP(**OURS)(labelled)
    noise = str(write_noise(tmp_path / "noise.npz"))
    with pytest.raises(NotBuiltError, match="contrastive loss"):
        train("vit_tiny", ["model={_target_: clip, cfg: {vocab_size: 30}}", f"train.output_dir={tmp_path / 'run'}"], data=[noise])
