"""From the config to datasets: splits, blends, what the config tells a dataset, the same on every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.config.registry import register_dataset
from dufu.data import CausalLMDataset, load_tokenizer
from dufu.data.blend import Concatenated, Weighted
from dufu.data.feed import Feed
from dufu.errors import ConfigError, DataError
from dufu.parallel.layout import layout_from_config
from dufu.parallel.process import join
from dufu.training.data import build_dataset, complete_model_config
from dufu.training.effective import effective_config
from tests.pool import Ranks
from tests.small import documents

TOKENIZER = load_tokenizer("bytes")


def build(
    files: list[Path], split: str = "train", overrides: list[str] | None = None, recipe: str = "gpt2_tiny", required: bool = True
) -> Any:
    config = effective_config(recipe, ["model.cfg.max_seq_length=32", *(overrides or [])], [str(f) for f in files])
    complete_model_config(config, TOKENIZER)
    processes = join(layout_from_config(config.train, 1), torch.device("cpu"))
    return build_dataset(config, TOKENIZER, split, processes, required)


def write(path: Path, count: int, start: int = 0) -> Path:
    path.write_text("\n".join(documents(start + count)[start:]) + "\n")
    return path


def test_the_splits_are_ranges_of_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", 20)
    found = [build([path], split, ["dataloader.split=[0.5,0.25,0.25]"]) for split in ("train", "valid", "test")]
    ends = [(d.start, d.stop) for d in found]
    assert ends[0][1] == ends[1][0] and ends[1][1] == ends[2][0] and ends[0][0] == 0 and ends[2][1] == len(found[2].source.tokens)


def test_a_split_with_files_of_its_own_leaves_the_others_whole(tmp_path: Path) -> None:
    data, valid = write(tmp_path / "a.txt", 10), write(tmp_path / "b.txt", 4, 10)
    overrides = ["dataloader.split=[0.5,0.5,0]", f"dataloader.valid_data=['{valid}']"]
    assert build([data], "train", overrides).stop == len(build([data], "train", overrides).source.tokens)
    assert build([data], "valid", overrides).stop == len("\n".join(documents(14)[10:]).encode()) + 1


def test_an_empty_split_is_none_or_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", 3)
    assert build([path], "valid", ["dataloader.split=[0.98,0.02,0]"], required=False) is None
    with pytest.raises(DataError, match="the valid split is empty"):
        build([path], "valid", ["dataloader.split=[0.98,0.02,0]"])
    with pytest.raises(DataError, match="the training split holds documents 0 to 0 of 3"):
        build([path], "train", ["dataloader.split=[0,1,0]"])


def test_several_files_are_joined_or_blended(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.txt", 10), write(tmp_path / "b.txt", 3, 10)]
    joined = build(files)
    assert isinstance(joined, Concatenated) and len(joined) == sum(len(build([f])) for f in files)
    blend = build(files, overrides=["dataloader.weights=[3,1]"])
    assert isinstance(blend, Weighted) and float(blend.shares[0]) == 0.75
    assert isinstance(build(files, "valid", ["dataloader.weights=[3,1]", "dataloader.split=[0.5,0.5,0]"]), Concatenated)
    with pytest.raises(ConfigError, match="one for each of the 2 files"):
        build(files, overrides=["dataloader.weights=[1]"])
    with pytest.raises(ConfigError, match="one positive number"):
        build(files, overrides=["dataloader.weights=[1,0]"])


def test_the_config_tells_a_dataset_what_its_signature_asks_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", 10)
    cache = tmp_path / "cache"
    overrides = ["train.seed=77", f"dataloader.cache_dir='{cache}'", "tokenization.chinese_wwm=true"]
    pytest.importorskip("jieba")
    made = build([path], overrides=overrides, recipe="bert_tiny")
    assert made.seed == 77 and made.marker.cut is not None and made.length == 32
    assert sorted(p.name for p in cache.iterdir()) == ["samples", "tokens"]
    assert build([path], overrides=[*overrides, "+dataloader.dataset.seed=5"], recipe="bert_tiny").seed == 5
    assert isinstance(build([path], overrides=overrides[:2]), CausalLMDataset)
    with pytest.raises(ConfigError, match="hides no whole words"):
        build([path], overrides=overrides)


@pytest.mark.parametrize("name", ["causal_lm", "masked_lm"])
def test_a_dataset_by_its_short_name(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.txt", 10)
    assert len(build([path], overrides=[f"dataloader.dataset._target_={name}"])) > 1


def test_sentences_of_raw_text_are_an_option(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", 10)
    whole, split = (
        build([path], overrides=[f"dataloader.split_sentences={b}"], recipe="bert_tiny").source for b in ("false", "true")
    )
    assert len(split) > len(whole) == 10 and split.document_count == 10


@pytest.mark.parametrize(
    "change",
    ["train.seed=5", "dataloader.split=[0.9,0.1,0]", "model.cfg.max_seq_length=16", "tokenization.append_eod=false", "content"],
)
@pytest.mark.parametrize("recipe", ["gpt2_tiny", "bert_tiny"])
def test_any_change_of_the_data_changes_the_runs_fingerprint(tmp_path: Path, recipe: str, change: str) -> None:
    """B084: what a checkpoint compares on resume. The changed content has the same name and length, in the middle of the file."""

    def fingerprint(overrides: list[str]) -> str:
        seed = 5 if "train.seed=5" in overrides else 1234
        return Feed(build([path], overrides=overrides, recipe=recipe), 4, seed).fingerprint()

    path = write(tmp_path / "a.txt", 20)
    base = fingerprint([])
    assert fingerprint([]) == base
    if change == "content":
        text = path.read_text()
        path.write_text(text[:700] + ("x" if text[700] != "x" else "y") + text[701:])
        assert fingerprint([]) != base
    else:
        assert fingerprint([change]) != base


@register_dataset("test_only_picky")
class Picky:
    """A dataset that cannot be made on the main process."""

    def __init__(
        self, source: Any, tokenizer: Any, first_document: int, last_document: int, sequence_length: int | None = None
    ) -> None:
        raise DataError("this dataset is never pleased")


def _on_a_rank(files: list[str], overrides: list[str], recipe: str) -> str:
    config = effective_config(recipe, ["model.cfg.max_seq_length=32", *overrides], files)
    complete_model_config(config, TOKENIZER)
    processes = join(layout_from_config(config.train, 2), torch.device("cpu"))
    try:
        return Feed(build_dataset(config, TOKENIZER, "train", processes), 4, 1).fingerprint()
    except (DataError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"


def test_every_process_has_the_same_data_from_a_cold_cache(ranks: Ranks, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", 20)
    overrides = [f"dataloader.cache_dir='{tmp_path / 'cache'}'"]
    found = ranks(2, _on_a_rank, [str(path)], overrides, "bert_tiny")
    assert found[0] == found[1] == Feed(build([path], recipe="bert_tiny"), 4, 1).fingerprint()


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("none.txt", [], "DataError: .*none.txt: no such file"),
        (
            "a.txt",
            ["dataloader.text_key=x", "dataloader.dataset._target_=test_only_picky"],
            "DataError: this dataset is never pleased",
        ),
        ("a.txt", ["dataloader.weights=[1,2]"], "ConfigError: dataloader.weights"),
    ],
)
def test_a_mistake_is_every_processes_mistake(ranks: Ranks, tmp_path: Path, name: str, overrides: list[str], message: str) -> None:
    """None of them waits for the others for ever."""
    import re

    write(tmp_path / "a.txt", 5)
    found = ranks(2, _on_a_rank, [str(tmp_path / name)], overrides, "gpt2_tiny", timeout=60)
    assert all(re.match(message, f) for f in found), found
