"""ViT from pictures to a trained run: it learns, any layout gives the numbers of one process, and a run goes on as if nothing had happened."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dufu.errors import ConfigError, DataError
from dufu.parity.check import check_config
from dufu.training.run import train
from tests.models.pictures import write_noise, write_shapes
from tests.pool import Ranks
from tests.small import dufu, metrics

# 10 tokens, which neither sequence nor context parallelism divides evenly
SMALL = ["model.cfg.img_size=12", "model.cfg.embed_dim=16", "model.cfg.depth=2", "model.cfg.num_heads=4"]
CHANGED = [
    "dataloader.dataset.mixup=0.8",
    "dataloader.dataset.cutmix=1.0",
    "dataloader.dataset.rand_augment=1",
    "dataloader.dataset.erase=0.5",
]
QUICK = "dp2,tp2,pp2,tp2xpp2"
ALL = "dp2:recompute,zero1,zero2,zero3,zero3xtp2,sp,sp3,spxpp2,cp2,cp2(ring),cp2(all_to_all),dp2xcp2,pp2(interleaved_1f1b):micro2,dp2:O1"


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_noise(tmp_path_factory.mktemp("noise") / "noise.npz")


def with_fault(fault: str, function: Callable[..., Any], *arguments: Any) -> Any:
    from dufu.parallel import faults

    with faults.inject(fault):
        return function(*arguments)


class Faulty:
    """The session's pool, with a fault in every layout but one process."""

    def __init__(self, pool: Any, fault: str) -> None:
        self.pool, self.fault = pool, fault

    def grow(self, size: int) -> None:
        self.pool.grow(size)

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
        changed = function if size == 1 else functools.partial(with_fault, self.fault, function)
        return self.pool(size, changed, *arguments, timeout=timeout)


def compare(noise: Path, layouts: str, pool: Any, *more: str) -> Any:
    return check_config("vit_tiny", [*SMALL, *CHANGED, *more], layouts=layouts, data=[str(noise)], steps=2, pool=pool)


def test_any_layout_gives_the_numbers_of_one_process_with_everything_drawn(noise: Path, ranks: Ranks) -> None:
    report = compare(noise, QUICK, ranks.pool)
    assert report.agrees, str(report)
    for finding in report.findings:
        assert all(any(sum(kinds.values()) for kinds in witness["sent"].values()) for witness in finding.witnesses)


@pytest.mark.skipif(os.environ.get("DUFU_MODELS") != "all", reason="DUFU_MODELS=all")
def test_every_kind_of_layout_gives_the_numbers_of_one_process(noise: Path, ranks: Ranks) -> None:
    heads = ["model.cfg.num_heads=6", "model.cfg.embed_dim=24", "model.cfg.depth=4"]  # so that three processes divide them too
    report = compare(noise, ALL, ranks.pool, *heads)
    assert report.agrees, str(report)


def test_a_missing_sum_turns_the_comparison_red(noise: Path, ranks: Ranks) -> None:
    assert not compare(noise, "tp2", Faulty(ranks.pool, "tensor.skip_enter")).agrees


def test_a_layout_is_compared_on_made_up_pictures_without_data(ranks: Ranks) -> None:
    report = check_config("vit_tiny", SMALL, layouts="dp2", steps=1, pool=ranks.pool)
    assert report.agrees, str(report)


def test_heads_that_do_not_divide_are_refused_by_name(noise: Path, ranks: Ranks) -> None:
    """LiBai's tiny ViT has three heads, which its tensor parallelism cannot divide (issue 226)."""
    with pytest.raises(
        Exception, match=r"layers\.0\.block\.attention: 3 attention heads do not divide over tensor_parallel_size=2"
    ):
        compare(noise, "tp2", ranks.pool, "model.cfg.num_heads=3", "model.cfg.embed_dim=18")


def test_a_run_learns_shapes_and_is_evaluated_on_other_folders(tmp_path: Path) -> None:
    data, other, run = write_shapes(tmp_path / "data", 60), write_shapes(tmp_path / "other", 12, seed=7), tmp_path / "run"
    train(
        "vit_tiny",
        [
            f"train.output_dir={run}", "train.train_iter=40", "train.evaluation.eval_period=40", "model.cfg.img_size=24",
            "train.evaluation.evaluator=top_k", "train.tensorboard=false", "optim.lr=2e-3",
        ],
        data=[str(data)],
    )  # fmt: skip
    (last,) = metrics(run, "valid")
    assert last["accuracy@1"] > 0.8  # chance is a third
    assert last["top_1"] == last["accuracy@1"] and last["top_5"] == 1.0
    config = (run / "config.yaml").read_text()
    assert "num_classes: 3" in config and "- triangle" in config and "tokens: 37" in config
    found = dufu("eval", str(run), "--data", str(other), "--json")
    assert found.returncode == 0, found.stderr
    record = json.loads(found.stdout)
    assert record["samples"] == 36 and record["accuracy@1"] > 0.8
    (other / "triangle").rename(other / "zebra")
    refused = dufu("eval", str(run), "--data", str(other))
    assert refused.returncode == 2 and "class 'zebra' is none of the model's 3" in refused.stderr


def test_a_run_that_was_stopped_goes_on_with_the_same_pictures(noise: Path, tmp_path: Path) -> None:
    def settings(folder: str) -> list[str]:
        return [*SMALL, *CHANGED, f"train.output_dir={tmp_path / folder}", "train.train_iter=6", "train.log_period=1", "train.global_batch_size=8",
                "train.evaluation.eval_period=6", "train.tensorboard=false"]  # fmt: skip

    train("vit_tiny", settings("whole"), data=[str(noise)])
    train("vit_tiny", [*settings("parts"), "train.stop_at_step=3"], data=[str(noise)])
    train("vit_tiny", settings("parts"), data=[str(noise)], resume=True)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole") and len(metrics(tmp_path / "whole")) == 6
    assert metrics(tmp_path / "parts", "valid") == metrics(tmp_path / "whole", "valid")


@pytest.mark.parametrize(
    ("overrides", "kind", "said"),
    [
        (["model.cfg.num_classes=3"], ConfigError, "num_classes=3, but the data have 7 classes"),
        (["dataloader.dataset.tokens=9"], ConfigError, "tokens=9, but the model takes 10"),
        (["dataloader.dataset={_target_: causal_lm}"], ConfigError, "takes pictures, but dataloader.dataset gives none"),
        (["dataloader.valid_data=[nowhere]"], DataError, "nowhere: no such file or folder"),
    ],
)
def test_what_does_not_fit_together_is_said_before_any_work(
    overrides: list[str], kind: type[Exception], said: str, noise: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=said):
        train("vit_tiny", [*SMALL, f"train.output_dir={tmp_path / 'run'}", *overrides], data=[str(noise)])
    assert not (tmp_path / "run").exists()


def test_pictures_for_a_model_of_text_are_refused(noise: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset=pictures, but dufu\.models\.bert\.Bert takes none"):
        train("bert_tiny", [f"train.output_dir={tmp_path / 'run'}", "dataloader.dataset={_target_: pictures}"], data=[str(noise)])


@pytest.mark.parametrize("share", ["null", "1.0"])
def test_a_run_exported_is_a_folder_that_transformers_classifies_pictures_with(share: str, tmp_path: Path) -> None:
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    from dufu.data.augment import Augmentation
    from dufu.models import Batch
    from dufu.training.export_hf import export_folder
    from dufu.training.load import load

    data, run = write_shapes(tmp_path / "data", 8, size=16), tmp_path / "run"
    settings = [
        f"train.output_dir={run}",
        "train.train_iter=2",
        "train.tensorboard=false",
        f"dataloader.dataset.crop_share={share}",
    ]
    train("vit_tiny", [*SMALL, *settings], data=[str(data)])
    export_folder(run, tmp_path / "out")
    theirs = AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.id2label == {0: "circle", 1: "square", 2: "triangle"}
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    image = Image.open(data / "square" / "003.png")
    pixels = Augmentation(12, crop_share=None if share == "null" else 1.0).plain(image)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    ready = processor(image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(ready[0], torch.from_numpy(pixels), rtol=0, atol=2 / 255 / 0.224)  # bytes rounded another way
    loaded = load(run)
    with torch.no_grad():
        mine = loaded.distributed.model(Batch(torch.arange(10)[None], extra={"pixels": ready}))
        torch.testing.assert_close(mine, theirs(ready).logits, rtol=1e-5, atol=1e-5)


def test_a_folder_is_evaluated_and_trained_on_with_its_own_pictures_settings_and_classes(tmp_path: Path) -> None:
    """The classes' order is the folder's, not that of the sub-folders' names; so are mean, standard deviation and scaling."""
    from dufu.training.export_hf import export_folder

    data, run, out = write_shapes(tmp_path / "data", 12, size=16), tmp_path / "run", tmp_path / "out"
    settings = [*SMALL, "train.train_iter=5", "train.tensorboard=false"]
    made = ["dataloader.dataset.crop_share=0.75", "dataloader.dataset.mean=[0.2]", "dataloader.dataset.std=[0.3]",
            "dataloader.dataset.classes=[triangle,square,circle]"]  # fmt: skip
    train("vit_tiny", [*settings, *made, f"train.output_dir={run}"], data=[str(data)])
    export_folder(run, out)
    found = [dufu("eval", str(folder), "--data", str(data), "--json") for folder in (run, out)]
    mine, theirs = (json.loads(each.stdout) for each in found)
    assert mine["accuracy@1"] == theirs["accuracy@1"] and mine["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
    plain = str((Path(__file__).parents[2] / "src/dufu/recipes/vit_tiny.py").read_text()).replace(", crop_share=None", "")
    (tmp_path / "plain.py").write_text(plain)
    train(
        str(tmp_path / "plain.py"),
        [f"model={out}", "train.train_iter=1", f"train.output_dir={tmp_path / 'more'}"],
        data=[str(data)],
    )
    config = (tmp_path / "more" / "config.yaml").read_text()
    assert "crop_share: 0.75" in config and "- 0.2\n" in config and "- 0.3\n" in config


def test_a_new_head_takes_the_place_of_one_of_other_classes(noise: Path, tmp_path: Path) -> None:
    from dufu.errors import CheckpointError
    from dufu.training.export_hf import export_folder

    data, out = write_shapes(tmp_path / "data", 6, size=16), tmp_path / "out"
    train(
        "vit_tiny",
        [*SMALL, "train.train_iter=1", "train.tensorboard=false", f"train.output_dir={tmp_path / 'run'}"],
        data=[str(data)],
    )
    export_folder(tmp_path / "run", out)
    settings = [
        f"model={out}",
        "model.cfg.num_classes=null",
        "train.train_iter=1",
        "train.tensorboard=false",
        f"train.output_dir={tmp_path / 'more'}",
    ]
    with pytest.raises(CheckpointError, match=r"classifier.weight is \[3, 16\] instead of \[7, 16\]"):
        train("vit_tiny", settings, data=[str(noise)])
    outcome = train("vit_tiny", [*settings, "train.allow_missing=[classifier]"], data=[str(noise)])
    assert outcome.finished and "num_classes: 7" in (tmp_path / "more" / "config.yaml").read_text()
