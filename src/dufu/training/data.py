"""From `dataloader` and `tokenization` to datasets: each file tokenised once, split by document, joined or blended."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dufu.config.configurable import takes_cfg
from dufu.config.instantiate import instantiate, resolve
from dufu.data.bert import BertDataset
from dufu.data.blend import Concatenated, Weighted
from dufu.data.cache import tokenised
from dufu.data.indexed import IndexedTokens
from dufu.data.splits import split_boundaries
from dufu.data.tokenizer import TextTokenizer, load_tokenizer
from dufu.errors import ConfigError, DataError, DufuError
from dufu.parallel.process import Processes

SPLITS = ("train", "valid", "test")


def tokenizer_from_config(config: DictConfig, kept: Path | None = None) -> TextTokenizer:
    """Return the run's tokenizer.

    Args:
        kept: the copy in the run's folder, for a run that goes on when what its config names is gone.
    """
    named = config.tokenization.tokenizer
    if kept is not None and named != "bytes" and not Path(named).exists() and (kept / "tokenizer.json").is_file():
        return load_tokenizer(kept)
    return load_tokenizer(named, config.tokenization.lower_case)


def open_sources(config: DictConfig, tokenizer: TextTokenizer, files: list[Any], processes: Processes) -> list[IndexedTokens]:
    """Return the token files of raw or preprocessed files; the main process makes what is missing, the others wait.

    Raises:
        DataError: a file is missing or unreadable; every process raises it.
    """
    loader = config.dataloader
    options = {
        "documents": loader.documents,
        "text_key": loader.text_key,
        "append_eod": config.tokenization.append_eod,
        "split_sentences": loader.split_sentences,
    }

    def prefixes() -> list[str]:
        return [tokenised(str(file), tokenizer, loader.cache_dir, **options) for file in files]

    made: list[str] = _main_first(processes, prefixes)
    # A host that does not share the main one's disk makes its own.
    if not all(Path(f"{prefix}.idx").is_file() for prefix in made):
        made = prefixes()
    return [IndexedTokens(prefix) for prefix in made]


def _main_first(processes: Processes, work: Callable[[], Any]) -> Any:
    """Return what `work` returns on the main process, after that process has done it; its mistake is every process's mistake."""
    result: Any = None
    failure: DufuError | None = None
    if processes.is_main:
        try:
            result = work()
        except DufuError as error:
            failure = error
    failure, result = processes.world.objects((failure, result))[0]
    if failure is not None:
        raise failure
    return result


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
    if loader.weights is not None and len(loader.weights) != len(loader.data):
        raise ConfigError(
            f"dataloader.weights={list(loader.weights)}: one for each of the {len(loader.data)} files of dataloader.data"
        )
    opens = hasattr(dataset_class(config), "open_source")
    given = {**({} if opens else {"tokenizer": tokenizer}), **_accepted(config, split)}
    parts = []
    for source in _sources(config, tokenizer, files, processes):
        first, last = (0, source.document_count) if own else _documents(config, split, source.document_count)
        if first < last and source.document_start(last) - source.document_start(first) >= getattr(source, "least", 2):
            arguments = {**given, "source": source, "first_document": first, "last_document": last}
            parts.append(_build(loader.dataset, arguments, processes))
        elif split == "train":
            raise DataError(
                f"{source.prefix}: the training split holds documents {first} to {last} of {source.document_count}, too few for a sample"
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


def dataset_class(config: DictConfig) -> Any:
    """Return the class that a config's dataset is of."""
    dataset = config.dataloader.dataset
    return resolve(dataset["_target_"]) if isinstance(dataset, DictConfig) else dataset


def _sources(config: DictConfig, tokenizer: TextTokenizer, files: list[Any], processes: Processes) -> Sequence[Any]:
    """Return what the files hold: pictures or whatever else the dataset opens itself (`open_source`), otherwise tokens."""
    opener = getattr(dataset_class(config), "open_source", None)
    return open_sources(config, tokenizer, files, processes) if opener is None else [opener(str(file)) for file in files]


def _build(dataset: Any, arguments: dict[str, Any], processes: Processes) -> Any:
    """Build a dataset; what it keeps in the cache is made by the main process, and the others find it there."""

    def prepare() -> None:
        instantiate(dataset, **arguments)

    _main_first(processes, prepare)
    return instantiate(dataset, **arguments)


def _documents(config: DictConfig, split: str, count: int) -> tuple[int, int]:
    """Return the range of a file's documents that belongs to a split."""
    loader = config.dataloader
    shares = [*loader.split, 0.0, 0.0, 0.0][: max(3, len(loader.split))]
    # A split with files of its own takes nothing from the common ones.
    for number, files in ((1, loader.valid_data), (2, loader.test_data)):
        if files:
            shares[number] = 0.0
    bounds = split_boundaries(count, shares)
    number = SPLITS.index(split)
    return bounds[number], bounds[number + 1]


def _accepted(config: DictConfig, split: str) -> dict[str, Any]:
    """Return what the rest of the config has to say to the dataset, as far as its signature has a place for it.

    Raises:
        ConfigError: Chinese words are to be marked, but the dataset marks no words.
    """
    loader = config.dataloader
    target = dataset_class(config)
    taken = set(inspect.signature(target).parameters) if callable(target) else set()
    offered = {"seed": config.train.seed, "chinese_wwm": config.tokenization.chinese_wwm, "cache_dir": loader.cache_dir,
               "training": split == "train"}  # fmt: skip
    cfg = OmegaConf.select(config, "model.cfg") or {}
    offered |= {name: cfg.get(name) for name in ("extra_ids", "decoder_start_token_id")}  # of an encoder-decoder model
    if config.tokenization.chinese_wwm and "chinese_wwm" not in taken:
        raise ConfigError("tokenization.chinese_wwm=true: dataloader.dataset hides no whole words; set it to false")
    return {name: value for name, value in offered.items() if name in taken and name not in loader.dataset}


def complete_model_config(config: DictConfig, tokenizer: TextTokenizer) -> None:
    """Fill in what follows from elsewhere: the vocabulary from the tokenizer, the sample's length from the model.

    A model class that is not `@configurable` has no `cfg`, and is left as it is.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's, or its positions fewer than a sample's.
    """
    if "model" not in config:
        raise ConfigError('the config has no section "model"')
    cfg = config.model.get("cfg", None)
    if cfg is None:
        if not takes_cfg(resolve(config.model["_target_"])):
            return  # a class whose own arguments say everything
        config.model.cfg = {}
        cfg = config.model.cfg
    complete = getattr(dataset_class(config), "complete_config", None)
    if complete is not None:
        complete(config)
        return
    if hasattr(resolve(config.model["_target_"]), "picture_tokens"):
        raise ConfigError(f"{config.model['_target_']} takes pictures, but dataloader.dataset gives none; set it to pictures")
    if cfg.get("vocab_size") is None:
        cfg.vocab_size = tokenizer.vocab_size
    if cfg.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.cfg.vocab_size={cfg.vocab_size}, but tokenizer {tokenizer.source} has {tokenizer.vocab_size} tokens; "
            f"set it to at least that, or to null"
        )
    dataset = config.dataloader.dataset
    pairs = isinstance(dataset, DictConfig) and resolve(dataset["_target_"]) is BertDataset
    if cfg.get("num_tokentypes") == 1 and pairs and dataset.get("sentence_pairs", "order") != "none":
        raise ConfigError(
            "model.cfg.num_tokentypes=1, but the samples are pairs of sentences, of two segments; set "
            "dataloader.dataset.sentence_pairs=none, or num_tokentypes=2"
        )
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
