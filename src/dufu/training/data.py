"""From `dataloader` and `tokenization` to datasets: each file tokenised once, split by document, joined or blended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dufu.config.instantiate import instantiate
from dufu.data.blend import Concatenated, Weighted
from dufu.data.indexed import IndexedTokens
from dufu.data.preprocess import tokenised
from dufu.data.splits import split_boundaries
from dufu.data.tokenizer import TextTokenizer, load_tokenizer
from dufu.errors import ConfigError, DataError
from dufu.parallel.process import Processes

SPLITS = ("train", "valid", "test")


def tokenizer_from_config(config: DictConfig) -> TextTokenizer:
    """Return the run's tokenizer."""
    return load_tokenizer(config.tokenization.tokenizer, config.tokenization.lower_case)


def open_sources(config: DictConfig, tokenizer: TextTokenizer, files: list[Any], processes: Processes) -> list[IndexedTokens]:
    """Return the token files of raw or preprocessed files; the main process makes what is missing, the others wait.

    Raises:
        DataError: a file is missing or unreadable; every process raises it.
    """
    loader = config.dataloader
    options = {"documents": loader.documents, "text_key": loader.text_key, "append_eod": config.tokenization.append_eod}
    failure = ""
    if processes.is_main:
        try:
            for file in files:
                tokenised(str(file), tokenizer, loader.cache_dir, **options)
        except (DataError, ConfigError) as error:
            failure = str(error)
    failure = processes.world.objects(failure)[0]
    if failure:
        raise DataError(failure)
    return [IndexedTokens(tokenised(str(f), tokenizer, loader.cache_dir, make=False, **options)) for f in files]


def build_dataset(config: DictConfig, tokenizer: TextTokenizer, split: str, processes: Processes, required: bool = True) -> Any:
    """Return the dataset of a split, or None where the split is empty and not required.

    Raises:
        ConfigError: no data or no dataset is named. DataError: a file is unreadable or the split is empty.
    """
    loader = config.dataloader
    own = {"train": [], "valid": list(loader.valid_data), "test": list(loader.test_data)}[split]
    files = own or list(loader.data)
    if not files:
        raise ConfigError("dataloader.data is empty; give files with --data FILE")
    if loader.dataset is None:
        raise ConfigError("dataloader.dataset is not set; name a dataset, such as causal_lm")
    shares = [s for s in (*loader.split, 0.0, 0.0)][:3]
    # A split with files of its own takes nothing from the common ones.
    for number, name in enumerate(SPLITS):
        if {"train": [], "valid": loader.valid_data, "test": loader.test_data}[name]:
            shares[number] = 0.0
    parts = []
    for source in open_sources(config, tokenizer, files, processes):
        count = source.document_count
        bounds = [0, count] if own else split_boundaries(count, shares)
        number = 0 if own else SPLITS.index(split)
        first, last = bounds[number], bounds[number + 1]
        if first < last and source.document_start(last) - source.document_start(first) >= 2:
            parts.append(instantiate(loader.dataset, source=source, tokenizer=tokenizer, first_document=first, last_document=last))
        elif split == "train":
            raise DataError(
                f"{source.prefix}: the training split holds documents {first} to {last} of {count}, too few for a sample"
            )
    if not parts:
        if required:
            raise DataError(f"the {split} split is empty: {list(loader.split)} of the documents in {', '.join(map(str, files))}")
        return None
    if len(parts) == 1:
        return parts[0]
    if split == "train" and loader.weights is not None:
        return Weighted(parts, list(loader.weights))
    return Concatenated(parts)


def complete_model_config(config: DictConfig, tokenizer: TextTokenizer) -> None:
    """Fill in what follows from elsewhere: the vocabulary from the tokenizer, the sample's length from the model.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's, or its positions fewer than a sample's.
    """
    if "model" not in config:
        raise ConfigError('the config has no section "model"')
    cfg = config.model.get("cfg", None)
    if cfg is None:
        config.model.cfg = {}
        cfg = config.model.cfg
    if cfg.get("vocab_size") is None:
        cfg.vocab_size = tokenizer.vocab_size
    if cfg.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.cfg.vocab_size={cfg.vocab_size}, but tokenizer {tokenizer.source} has {tokenizer.vocab_size} tokens; "
            f"set it to at least that, or to null"
        )
    dataset = config.dataloader.dataset
    longest = cfg.get("max_seq_length")
    if isinstance(dataset, DictConfig) and longest is not None:
        if dataset.get("sequence_length") is None:
            OmegaConf.update(config, "dataloader.dataset.sequence_length", longest, force_add=True)
        elif dataset.sequence_length > longest:
            raise ConfigError(
                f"dataloader.dataset.sequence_length={dataset.sequence_length} exceeds model.cfg.max_seq_length={longest}"
            )


def save_tokenizer(tokenizer: TextTokenizer, folder: Path) -> None:
    """Write the tokenizer into a run's folder."""
    tokenizer.save(folder / "tokenizer")
