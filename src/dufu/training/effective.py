"""From what the user wrote to the effective config: file or recipe → overrides → check."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dufu.config.check import check_config
from dufu.config.lazy import as_config
from dufu.config.load import LazyConfig, recipes_folder
from dufu.config.overrides import apply_overrides
from dufu.config.schema import SECTIONS, to_dict
from dufu.errors import ConfigError, NotBuiltError, nearest

SECTION_NAMES = [*SECTIONS, "model", "optim"]


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes."""
    return sorted(p.stem for p in recipes_folder().glob("*.py") if not p.stem.startswith("_"))


def read_config(source: str | Path) -> DictConfig:
    """Return the config of a recipe's name, a `.py` or `.yaml` file, or a run's folder, as it is written there."""
    path = Path(source)
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{path}: a folder without config.yaml; give a run's folder, a file or a recipe's name")
        path = path / "config.yaml"
    elif path.suffix not in (".py", ".yaml", ".yml"):
        path = recipes_folder() / f"{source}.py"
        if not path.is_file():
            raise ConfigError(f'no recipe is called "{source}"{nearest(str(source), recipe_names())}')
    config: DictConfig = LazyConfig.load(path)
    if path.suffix == ".py":
        others = [str(k) for k in config if k not in SECTION_NAMES]
        for name in others:
            hint = nearest(name, [s for s in SECTION_NAMES if s not in config])
            if "did you mean" in hint:
                raise ConfigError(f'{path}: no section is called "{name}"{hint}')
        config = as_config({k: config[k] for k in config if k in SECTION_NAMES})
    return config


def effective_config(
    source: str | Path | DictConfig, overrides: Sequence[str] = (), data: Sequence[str] = (), fast_dev_run: bool = False
) -> DictConfig:
    """Return the checked config with every default filled in.

    Args:
        source: a recipe's name, a file, a run's folder, or a config.
        overrides: `key=value` texts.
        data: files that replace `dataloader.data`.
        fast_dev_run: 20 steps, evaluation every 10, a line every step.
    """
    written = source if isinstance(source, DictConfig) else read_config(source)
    base = as_config({name: to_dict(cls()) for name, cls in SECTIONS.items()})
    config: Any = base
    for name in written:
        if name in SECTIONS and isinstance(written[name], DictConfig):
            _lay_over(config[name], written[name], str(name))
        else:
            config[name] = written[name]
    if fast_dev_run:
        overrides = [
            *overrides,
            "train.train_iter=20",
            "train.train_epoch=0",
            "train.evaluation.eval_period=10",
            "train.log_period=1",
        ]
    apply_overrides(config, overrides)
    if data:
        config.dataloader.data = [str(d) for d in data]
    return check_config(config)


def _lay_over(base: DictConfig, written: DictConfig, where: str) -> None:
    """Put written values over defaults, section by section; a recorded call replaces what stood there as a whole."""
    for key in written:
        value = written[key]
        held = base[key] if key in base else None
        if isinstance(value, DictConfig) and isinstance(held, DictConfig) and "_target_" not in value and "_target_" not in held:
            _lay_over(held, value, f"{where}.{key!s}")
        else:
            base[key] = value


def refuse_unbuilt(config: DictConfig) -> None:
    """Raise NotBuiltError for what a config asks and does not exist yet, before any work is spent."""
    if config.graph.auto_parallel.enabled:
        raise NotBuiltError("auto parallel is not built yet; set graph.auto_parallel.enabled=false and choose train.dist yourself")


def seconds(text: str | None) -> float | None:
    """Return a time such as "50min", "2h", "90s" in seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d)?\s*", str(text))
    if not match:
        raise ConfigError(f'train.stop_after="{text}": a number with s, min, h or d, such as "50min"')
    return float(match[1]) * {"s": 1, "sec": 1, None: 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[match[2]]
