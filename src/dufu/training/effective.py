"""From what the user wrote to the effective config: file or recipe → overrides → check."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, SCMode

from dufu.config.check import check_config
from dufu.config.lazy import as_config, clear_errors
from dufu.config.load import SUFFIXES, LazyConfig, get_config, recipes_folder
from dufu.config.overrides import apply_overrides, set_over
from dufu.config.schema import SECTION_NAMES, SECTIONS, to_dict
from dufu.errors import ConfigError, NotBuiltError, nearest
from dufu.training.pretrained import adopt_folder, expand_model

FAST_DEV_RUN = ("train.train_iter=20", "train.train_epoch=0", "train.evaluation.eval_period=10", "train.log_period=1")


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes."""
    return sorted(p.stem for p in recipes_folder().glob("*.py") if not p.stem.startswith("_"))


def config_file(source: str | Path) -> Path:
    """Return the file that a recipe's name, a `.py` or `.yaml` path, or a run's folder stands for.

    Raises:
        ConfigError: there is none, or a bare name is both a recipe's and a folder's.
    """
    path = Path(source)
    if path.is_dir():
        if str(source) in recipe_names():
            raise ConfigError(f'"{source}" is a recipe and a folder here; write ./{source} for the folder, or call from elsewhere')
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{path}: a folder without config.yaml; give a run's folder, a file or a recipe's name")
        return path / "config.yaml"
    if path.suffix in SUFFIXES:
        return path
    if str(source) not in recipe_names():
        raise ConfigError(f'no recipe is called "{source}"{nearest(str(source), recipe_names())}')
    return recipes_folder() / f"{source}.py"


def read_config(source: str | Path) -> DictConfig:
    """Return the config of a recipe's name, a `.py` or `.yaml` file, or a run's folder, as it is written there.

    What else a `.py` file defines at its top is its own affair, unless it looks like a misspelt section.
    """
    path = config_file(source)
    config: DictConfig = LazyConfig.load(path)
    if path.suffix != ".py":
        return config
    for name in config:
        if name in SECTION_NAMES:
            continue
        hint = nearest(str(name), [s for s in SECTION_NAMES if s not in config])
        if "did you mean" in hint:
            raise ConfigError(f'{path}: no section is called "{name!s}"{hint}')
    return DictConfig({k: config[k] for k in config if k in SECTION_NAMES}, flags={"allow_objects": True})


def effective_config(
    source: str | Path | DictConfig, overrides: Sequence[str] = (), data: Sequence[str] = (), fast_dev_run: bool = False
) -> DictConfig:
    """Return the checked config with every default filled in.

    Args:
        source: a recipe's name, a file, a run's folder, or a config.
        overrides: `key=value` texts.
        data: files that replace `dataloader.data`.
        fast_dev_run: 20 steps, evaluation every 10, a line every step, in `fast_dev_run` below the output folder.

    Raises:
        ConfigError: an unknown, misplaced or wrongly typed key, or two places that disagree.
    """
    written = source if isinstance(source, DictConfig) else read_config(source)
    config: Any = as_config({name: to_dict(cls()) for name, cls in SECTIONS.items()})
    # Interpolations stay as they are written, so that they see the defaults and the overrides.
    with clear_errors():
        values = OmegaConf.to_container(written, resolve=False, structured_config_mode=SCMode.INSTANTIATE)
    assert isinstance(values, dict)
    for name, value in values.items():
        set_over(config, name, value)
    overrides = expand_model(config, overrides)
    apply_overrides(config, [*overrides, *(FAST_DEV_RUN if fast_dev_run else ())])
    if data:
        config.dataloader.data = [str(d) for d in data]
    if fast_dev_run:  # a trial stays out of the way of the run that it tries
        config.train.output_dir = str(Path(config.train.output_dir) / "fast_dev_run")
        config.train.overwrite = True
    complete_optimizer(config)
    checked = check_config(config)
    adopt_folder(checked)
    refuse_disagreement(checked)
    return checked


def complete_optimizer(config: DictConfig) -> None:
    """Let an optimizer that is given by name alone (`optim=sgd`) have the usual parameter groups."""
    if isinstance(config.get("optim"), str):
        config.optim = {"_target_": config.optim}
    if isinstance(config.get("optim"), DictConfig) and "_target_" in config.optim and "params" not in config.optim:
        config.optim.params = get_config("common/optim.py").optim.params


def refuse_disagreement(config: DictConfig) -> None:
    """Raise ConfigError where two keys set the same thing differently, with both values."""
    from dufu.optim.groups import clip_setting

    params = config.get("optim", {}).get("params")
    if isinstance(params, DictConfig):
        clip_setting(params.get("clip_grad_max_norm"), params.get("clip_grad_norm"))
    scheduler, ratio = config.train.scheduler, config.train.warmup_ratio
    if isinstance(scheduler, DictConfig) and "warmup_iter" in scheduler and ratio:
        raise ConfigError(
            f"train.scheduler.warmup_iter={scheduler.warmup_iter} but train.warmup_ratio={ratio}; give one of them (the other 0)"
        )


def refuse_unbuilt(config: DictConfig) -> None:
    """Raise NotBuiltError for what a config asks and does not exist yet, before any work is spent."""
    if config.graph.auto_parallel.enabled:
        raise NotBuiltError("auto parallel is not built yet; set graph.auto_parallel.enabled=false and choose train.dist yourself")


def seconds(text: str | None, key: str = "train.stop_after") -> float | None:
    """Return a time such as "50min", "2h", "90s" in seconds.

    Args:
        key: where it stands, for the message.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d)?\s*", str(text))
    if not match:
        raise ConfigError(f'{key}="{text}": a number with s, min, h or d, such as "50min"')
    return float(match[1]) * {"s": 1, "sec": 1, None: 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[match[2]]
