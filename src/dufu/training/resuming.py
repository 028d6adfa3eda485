"""What a resumed run may change: layout, logging, output, length. What would change the mathematics is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dufu.config.lazy import as_config
from dufu.config.load import LazyConfig
from dufu.errors import CheckpointError, ConfigError
from dufu.training.batch_size import plan_batch
from dufu.training.checkpoint import CheckpointReader

# Everything under these keys decides the numbers. The data's content and order are compared by fingerprint instead of by path.
MATHEMATICS = (
    "model",
    "optim",
    "tokenization",
    "dataloader.dataset",
    "dataloader.split",
    "dataloader.weights",
    "dataloader.shuffle",
    "train.seed",
    "train.global_batch_size",
    "train.scheduler",
    "train.warmup_ratio",
    "train.amp",
    "train.ema",
    "train.adapter",
)
DATA = "dataloader.data"


def saved_config(reader: CheckpointReader) -> DictConfig:
    """Return the effective config that a checkpoint was written under."""
    config: DictConfig = LazyConfig.load(reader.folder / "config.yaml")
    return config


def inherit_batch(config: DictConfig, reader: CheckpointReader, data_parallel: int, overrides: Sequence[str]) -> None:
    """Keep the run's global batch; where the layout has changed, the accumulation follows from it unless this call names it.

    Args:
        data_parallel: processes that share the global batch now.
        overrides: this call's `key=value` texts.
    """
    train = config.train
    given = {text.split("=", 1)[0].lstrip("+~") for text in overrides}
    whole = int(reader.state["global_batch"])
    if train.global_batch_size is None:
        train.global_batch_size = whole
    if train.num_accumulation_steps is None or "train.num_accumulation_steps" in given:
        return
    try:
        plan_batch(train, data_parallel)
    except ConfigError:
        train.num_accumulation_steps = None


def may_change_data(allowed: Sequence[str]) -> bool:
    """Say whether `--allow-change` lets the samples or their order differ."""
    return any(key == "train.seed" or key.split(".")[0] in ("dataloader", "tokenization") for key in allowed)


def same_optimizer(reader: CheckpointReader, config: DictConfig) -> bool:
    """Say whether the optimizer is the one whose state was saved (another one, where allowed, begins without any)."""
    return bool(saved_config(reader).optim.get("_target_") == config.optim.get("_target_"))


def leaves(value: Any, path: str) -> dict[str, Any]:
    """Return the values of a nested dict by their dotted keys, which begin with `path`."""
    if isinstance(value, dict) and value:
        out: dict[str, Any] = {}
        for key, inner in value.items():
            out.update(leaves(inner, f"{path}.{key}"))
        return out
    return {path: value}


def compare_configs(reader: CheckpointReader, config: DictConfig, allowed: Sequence[str]) -> None:
    """Raise when the given config would change the numbers of the resumed run.

    Args:
        allowed: keys (or their parents) that may differ all the same.

    Raises:
        CheckpointError: names every key that differs, with both values.
        ConfigError: an allowed key is none of those compared.
    """
    for key in allowed:
        if not any(key == known or key.startswith(known + ".") or known.startswith(key + ".") for known in (*MATHEMATICS, DATA)):
            raise ConfigError(f"--allow-change {key}: not a key that is compared; those are {', '.join((*MATHEMATICS, DATA))}")
    before = OmegaConf.to_container(as_config(saved_config(reader)), resolve=True)
    after = OmegaConf.to_container(OmegaConf.create(LazyConfig.to_yaml(config)), resolve=True)
    different = []
    for key in MATHEMATICS:
        old, new = leaves(_select(before, key), key), leaves(_select(after, key), key)
        for path in sorted({*old, *new}):
            if old.get(path) != new.get(path) and not any(path == a or path.startswith(a + ".") for a in allowed):
                different.append(f"{path} was {old.get(path)!r}, is now {new.get(path)!r}")
    if different:
        raise CheckpointError(
            f"resuming {reader.folder} would change the numbers: {'; '.join(different)}; "
            f"restore the values or add --allow-change KEY"
        )


def _select(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
