"""Models from Hugging Face folders: `model=FOLDER` in a config, and the folder itself where a run's folder may stand."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from dufu.config.instantiate import instantiate, resolve
from dufu.config.lazy import as_config
from dufu.data.picture_processor import folder_settings, processor_settings
from dufu.errors import CheckpointError, ConfigError
from dufu.interchange.export import DTYPES
from dufu.interchange.folder import is_folder, open_folder
from dufu.interchange.source import ForeignWeights, WeightSource
from dufu.models.hf import canonical, complete, describe_folder, family_of
from dufu.models.lora import Lora, is_adapter
from dufu.training.adapters import AdaptedSource, BaseSource, missing_base, sites_of
from dufu.training.checkpoint import CheckpointReader, find_weights
from dufu.training.peft_folder import first_adapters
from dufu.training.resuming import saved_config

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json")
# What a run keeps of the folder it began from, and an export gives on; in the run's folder under ORIGIN.
KEPT = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "preprocessor_config.json",
)  # fmt: skip
ORIGIN = "pretrained"
OUTSIDE = "dufu.models.huggingface.HuggingFace"


def folder_of(model: Any) -> tuple[Path, str] | None:
    """Return the folder that a `model` setting names, and the class that it asks for ("" = the folder's own), or None.

    `FOLDER:BertForSequenceClassification` reads the folder as if its config.json named that class.

    Raises:
        CheckpointError: what looks like a path leads to no Hugging Face folder.
    """
    if not isinstance(model, str) or model.lstrip().startswith("{"):  # a recorded call
        return None
    if is_folder(Path(model)):
        return Path(model), ""
    path, _, architecture = model.rpartition(":")
    if path and is_folder(Path(path)):
        return Path(path), architecture
    if os.sep in model or model.startswith("."):
        raise CheckpointError(f"model={model}: {path or model} is no Hugging Face folder, it has no config.json")
    return None


def expand_model(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Put the model that a folder describes in the place of the folder's name; return the overrides that are left.

    The weights, and unless the config names another one the tokenizer, are the folder's too.
    """
    left, named = [], config.get("model")
    for text in overrides:
        key, equals, value = text.partition("=")
        written = value.strip().strip("'\"")
        if key.strip() == "model" and equals and folder_of(written) is not None:
            named = written
        else:
            left.append(text)
    found = folder_of(named)
    if found is None:
        return left
    folder, architecture = found
    config.model = as_config(model_of(folder, architecture))
    if not config.train.load_weight:
        config.train.load_weight = str(folder)
    if config.tokenization.tokenizer == "bytes" and has_tokenizer(folder):
        config.tokenization.tokenizer = str(folder)
    dataset = config.dataloader.dataset
    if isinstance(dataset, DictConfig) and hasattr(resolve(config.model["_target_"]), "picture_tokens"):
        for name, value in processor_settings(folder).items():
            if name not in dataset:  # a picture is made ready as the folder's model knows it, unless the config says otherwise
                dataset[name] = value
    return left


def adopt_folder(config: DictConfig) -> None:
    """Let transformers' own class of a folder begin with the folder's weights, and unless the config names another one its tokenizer."""
    model = config.get("model")
    if not isinstance(model, DictConfig) or "_target_" not in model or canonical(resolve(model["_target_"])) != OUTSIDE:
        return
    given = {str(name): value for name, value in model.items() if name not in ("_target_", "cfg")}
    config.model = {"_target_": model["_target_"], "cfg": {**(model.get("cfg") or {}), **given}}
    folder = Path(str(config.model.cfg.get("folder", "")))
    if not is_folder(folder):
        raise CheckpointError(f"model.cfg.folder={folder} is no Hugging Face folder, it has no config.json")
    if not config.train.load_weight and not config.model.cfg.get("from_scratch", False):
        config.train.load_weight = str(folder)
    if config.tokenization.tokenizer == "bytes" and has_tokenizer(folder):
        config.tokenization.tokenizer = str(folder)


def model_of(folder: Path, architecture: str = "") -> dict[str, Any]:
    """Return the `model` section of a folder."""
    described = describe_folder(folder, architecture)
    return {"_target_": described.target, "cfg": described.cfg}


def has_tokenizer(folder: Path) -> bool:
    """Say whether a folder holds a tokenizer that is read here."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def keep_origin(folder: Path, run: Path) -> None:
    """Copy what a run keeps of the Hugging Face folder it begins from into the run's folder."""
    (run / ORIGIN).mkdir(exist_ok=True)
    for name in KEPT:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, run / ORIGIN / name)


def torch_dtype(folder: Path) -> str:
    """Return the type of a folder's weights, such as "bfloat16": that of its largest tensor."""
    tensors = open_folder(folder)
    largest = max(tensors.names(), key=lambda name: math.prod(tensors.shape(name)))
    found = str(tensors.dtype(largest)).removeprefix("torch.")
    return found if found in DTYPES else "float32"


def end_tokens_of(folder: Path) -> tuple[int, ...]:
    """Return the numbers of the tokens that end a text, as a Hugging Face folder (or what a run kept of one) names them; () for none.

    Raises:
        CheckpointError: a file is not JSON.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
        if found is not None:
            return tuple(map(int, found)) if isinstance(found, list) else (int(found),)
    return ()


def config_of_folder(folder: Path) -> DictConfig:
    """Return the config under which a folder is evaluated or continues text.

    Raises:
        CheckpointError: its config.json describes no model of ours.
    """
    model = model_of(folder)
    target = resolve(model["_target_"])
    dataset = getattr(target, "dataset", "causal_lm" if getattr(target, "causal", False) else None)
    sections: dict[str, Any] = {"model": model, "train": {"load_weight": str(folder)}}
    if hasattr(target, "picture_tokens"):
        sections["dataloader"] = {"dataset": {"_target_": "pictures", **folder_settings(folder)}}
    elif dataset is not None:
        one_segment = {"sentence_pairs": "none"} if model["cfg"].get("num_tokentypes") == 1 else {}
        sections["dataloader"] = {"dataset": {"_target_": dataset, "sequence_length": None, **one_segment}}
    if has_tokenizer(folder):
        sections["tokenization"] = {"tokenizer": str(folder)}
    return as_config(sections)  # type: ignore[no-any-return]


def left_out(source: WeightSource) -> str:
    """Return a line on what a folder holds of other heads, "" where that is nothing."""
    spare = source.spare if isinstance(source, ForeignWeights) else []
    return f"left out, being of another head: {', '.join(spare)} of {source.folder}" if spare else ""


def open_weights(
    path: Path, model: DictConfig, shapes: Mapping[str, tuple[int, ...]], verify: bool = True, base: str = ""
) -> WeightSource:
    """Return the weights of a checkpoint or of a Hugging Face folder.

    Args:
        path: from `find_weights`.
        model: the config's `model` section.
        shapes: of the model's parameters.
        verify: whether to compare a checkpoint's files with their checksums.
        base: where the weights beside a checkpoint's adapters are; "" = where they were when it was written.

    Raises:
        CheckpointError: incomplete or damaged.
        ConfigError: the model has no counterpart in Hugging Face's formats.
    """
    if not is_folder(path):
        return with_base(CheckpointReader(path, verify), model, shapes, base)
    target, cfg = named_model(model)
    family = family_of(target)
    if family.describes and family_of(describe_folder(path).target) is not family:
        raise CheckpointError(f"{path} is of another model: it holds a {describe_folder(path).target}, the config has a {target}")
    return ForeignWeights(open_folder(path), family.table(target, cfg), shapes)


def with_base(reader: CheckpointReader, model: DictConfig, shapes: Mapping[str, tuple[int, ...]], base: str = "") -> WeightSource:
    """Return the weights of a checkpoint; those of one that holds adapters only together with the base weights.

    Raises:
        CheckpointError: the base weights are not there.
    """
    if "adapter" not in reader.state:
        return reader
    config = saved_config(reader)
    where = base or str(config.train.load_weight or "")
    below: WeightSource | None = None
    if where:
        try:
            path = find_weights(where)
        except CheckpointError:
            raise missing_base(reader.folder, where) from None
        below = open_weights(path, model, {name: shape for name, shape in shapes.items() if not is_adapter(name)})
    return AdaptedSource(reader, below, sites_of(config), averaged=bool(config.train.ema.enabled))


def first_weights(path: Path, model: DictConfig, shapes: Mapping[str, tuple[int, ...]], adapter: Lora | None) -> WeightSource:
    """Return the weights that a run begins with; adapters among its parameters begin as they are made."""
    if adapter is None:
        return open_weights(path, model, shapes)
    rest = {name: shape for name, shape in shapes.items() if not is_adapter(name)}
    base = open_weights(path, model, rest)
    if adapter.folder is None:
        return BaseSource(base, {})
    target, cfg = named_model(model)
    with torch.device("meta"):
        adapter.apply(instantiate(model))
    return BaseSource(base, first_adapters(adapter, family_of(target).table(target, cfg), base, rest))


def named_model(model: DictConfig) -> tuple[str, dict[str, Any]]:
    """Return the dotted path of a `model` section's class and its complete arguments.

    Raises:
        ConfigError: the section records no call.
    """
    if "_target_" not in model:
        raise ConfigError("the config's model is no recorded call")
    target = canonical(resolve(model["_target_"]))
    given = OmegaConf.to_container(model, resolve=True)
    assert isinstance(given, dict)
    inner = given.get("cfg")
    arguments = inner if isinstance(inner, dict) else {name: value for name, value in given.items() if name != "_target_"}
    return target, complete(target, {str(name): value for name, value in arguments.items()})
