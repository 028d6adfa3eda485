"""What a format is: how its files are opened, what they say of the model, and the table of their names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from dufu.errors import CheckpointError, ConfigError, nearest
from dufu.interchange.formats.reading import open_any
from dufu.interchange.tensor_file import TensorFile
from dufu.models.names import Rule, Shape, Table, same

FAMILIES = {"gpt2": "dufu.models.gpt2.GPT2", "bert": "dufu.models.bert.Bert", "roberta": "dufu.models.roberta.Roberta"}
LEAVES = ("weight", "bias")
# What no file of weights shows; it is given, said by the program's own settings, or known from a published size.
UNSEEN = ("num_attention_heads",)


@dataclass
class Source:
    """What was found in a path.

    Args:
        path: where.
        files: of tensors; their names as they are there.
        settings: what the checkpoint and a config beside it say, by the program's own names.
        given: what the user says, by the program's names or ours.
        shards: tensor-parallel processes that wrote it.
    """

    path: Path
    files: list[TensorFile]
    settings: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    shards: int = 1

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting by the program's name: the user's word first."""
        for known in (self.given, self.settings):
            if known.get(name) is not None:
                return known[name]
        return default

    def shapes(self, old_names: tuple[tuple[str, str], ...]) -> dict[str, Shape]:
        """Return all shapes by today's names."""
        found: dict[str, Shape] = {}
        for file in self.files:
            for name in file.names():
                renewed = name
                for pattern, replacement in old_names:
                    renewed = re.sub(pattern, replacement, renewed)
                found[renewed] = file.shape(name)
        return found

    def rows(self, old_names: tuple[tuple[str, str], ...], name: str, first: int, count: int) -> Tensor:
        """Read rows of a tensor by today's name."""
        for file in self.files:
            for there in file.names():
                renewed = there
                for pattern, replacement in old_names:
                    renewed = re.sub(pattern, replacement, renewed)
                if renewed == name:
                    return file.rows(there, first, count)
        raise AssertionError(name)


@dataclass(frozen=True)
class Made:
    """A tensor that our model has and the format does not.

    Args:
        value: what stands for it.
        needed: whether our values must equal it, so that the format can hold the model; otherwise nothing uses them.
    """

    value: Tensor
    needed: bool = True


@dataclass
class Plan:
    """How one model lies in a format.

    Args:
        table: of names; it may name tensors of `made`.
        made: what the files do not hold.
        factors: our parameters that are their numbers, times this.
        zeros: patterns of foreign names that must hold zeros, and are then left out.
        rows: rows of foreign tensors that have more than we hold.
        notes: what a user should know, a line each.
    """

    table: Table
    made: dict[str, Made] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    zeros: tuple[str, ...] = ()
    rows: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Found:
    """A model that a file holds: our class, its arguments, and what was assumed."""

    target: str
    cfg: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the content of a JSON or YAML file of settings.

    Raises:
        ConfigError: it is none.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not readable as JSON or YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds no named settings")
    return {str(name): value for name, value in found.items()}


def open_plain(path: Path) -> Source:
    """Open a file or folder of named tensors."""
    return Source(path, open_any(path))


@dataclass(frozen=True)
class Format:
    """A program's checkpoints.

    Args:
        name: as `--from` takes it.
        mark: a pattern that one of its names contains, and no name of the others.
        describe: from a source and the family that was asked for ("" = none), the model.
        plan: from our class, its complete arguments and the source (None = it is to be written), how it lies there.
        open: a path.
        wrap: from the tensors, our class and its arguments, what is saved.
        place: the file within the path that is written; "" = the path is the file.
        settings: names that the program's own settings have, beside our arguments.
        writes_copies: whether tied weights are written under each of their names.
        norm_factor: from a norm's width what its weights are multiplied by so that ours computes the same; None = nothing.
        beside: texts of small files in the folder that is written.
        write_settings: from our class and its arguments the settings that are written beside the file, as OUT.json.
    """

    name: str
    mark: str
    describe: Callable[[Source, str], Found]
    plan: Callable[[str, Mapping[str, Any], Source | None], Plan]
    open: Callable[[Path], Source] = open_plain
    wrap: Callable[[dict[str, Tensor], str, Mapping[str, Any]], Any] = lambda tensors, target, cfg: tensors
    place: str = ""
    settings: tuple[str, ...] = ()
    writes_copies: bool = False
    norm_factor: Callable[[int], float] | None = None
    beside: Mapping[str, str] = field(default_factory=dict)
    write_settings: Callable[[str, Mapping[str, Any]], dict[str, Any]] | None = None


def linear(ours: str, theirs: str, leaves: tuple[tuple[str, str], ...] = (("weight", "weight"), ("bias", "bias"))) -> list[Rule]:
    """Return the rules of a weight and a bias."""
    return [same(f"{ours}.{a}", f"{theirs}.{b}") for a, b in leaves]


def count_layers(shapes: Mapping[str, Shape], pattern: str, where: Path) -> int:
    """Return how many layers there are, by the numbers in names that match a pattern with one group.

    Raises:
        CheckpointError: there are none, or numbers are left out.
    """
    numbers = {int(m.group(1)) for name in shapes if (m := re.match(pattern, name))}
    if not numbers or numbers != set(range(len(numbers))):
        lacking = sorted(set(range(max(numbers, default=0) + 1)) - numbers)
        raise CheckpointError(f"{where}: layers are missing: {', '.join(map(str, lacking[:8]))}")
    return len(numbers)


def shape_of(shapes: Mapping[str, Shape], name: str, where: Path, dims: int = 2) -> Shape:
    """Return the shape of a tensor without which the model's sizes cannot be told.

    Raises:
        CheckpointError: it is missing, or has another number of dimensions.
    """
    if name not in shapes:
        raise CheckpointError(f"{where}: has no {name}{nearest(name, shapes)}")
    if len(shapes[name]) != dims:
        raise CheckpointError(f"{where}: {name} is {list(shapes[name])} instead of a tensor of {dims} dimensions")
    return shapes[name]


def choose_family(asked: str, guessed: tuple[str, ...], where: Path) -> str:
    """Return the family that a file holds: the one that was asked for, or the only one that fits its names.

    Raises:
        ConfigError: several fit and none was asked for, or another one was.
    """
    if asked and asked not in guessed:
        raise ConfigError(f"--model {asked}: the names in {where} are those of a {' or '.join(guessed)}")
    if not asked and len(guessed) > 1:
        raise ConfigError(f"{where}: its names fit {' and '.join(guessed)}; choose with --model {'|'.join(guessed)}")
    return asked or guessed[0]


def published(family: str) -> dict[str, dict[str, Any]]:
    """Return a family's published sizes by name: those with a vocabulary."""
    sizes: dict[str, dict[str, Any]] = import_module(f"dufu.models.{family}.sizes").SIZES
    return {name: size for name, size in sizes.items() if size["vocab_size"] is not None}


def add_unseen(family: str, cfg: dict[str, Any], size: str = "") -> list[str]:
    """Fill in what the weights do not show, out of the published size that has the same layers and widths.

    Args:
        size: the published size that was asked for; "" = whichever fits.

    Returns:
        A line for each thing that was filled in.

    Raises:
        ConfigError: no published size fits, or what was said cannot be.
    """
    notes = []
    for name in UNSEEN:
        value = cfg.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1 or cfg["hidden_size"] % value:
                raise ConfigError(f"{name}={value}: a whole number that divides the width, {cfg['hidden_size']}")
            continue
        keys = ("hidden_layers", "hidden_size", "ffn_hidden_size")
        fits = {n: s for n, s in published(family).items() if all(s[k] == cfg[k] for k in keys) and size in ("", n)}
        if not fits:
            shown = ", ".join(f"{key}={cfg[key]}" for key in keys)
            raise ConfigError(f"the weights do not show {name}, and no published {family} has {shown}; give {name}=NUMBER")
        known = next(iter(fits))
        cfg[name] = fits[known][name]
        notes.append(f"assumed {name}={cfg[name]}, as in {known}; the weights do not show it")
    return notes


def told(
    source: Source, cfg: dict[str, Any], name: str, theirs: str, value: Any, why: str, take: Callable[[Any], Any] = lambda v: v
) -> list[str]:
    """Set an argument from the user's word, from the program's setting, or else as assumed; return the line that says the last.

    Args:
        name: our argument; what the user gives under it is taken as it is.
        theirs: the program's setting.
        value: what is assumed.
        why: the reason.
        take: from the program's value ours.
    """
    if source.given.get(name) is not None:
        cfg[name] = source.given[name]
        return []
    if source.setting(theirs) is not None:
        cfg[name] = take(source.setting(theirs))
        return []
    cfg[name] = value
    return [f"assumed {name}={value}, {why}"]


def agree(source: Source, cfg: Mapping[str, Any], **pairs: str) -> None:
    """Compare the program's settings with what the weights show.

    Args:
        pairs: the program's name = our argument.

    Raises:
        CheckpointError: they differ.
    """
    for theirs, ours in pairs.items():
        value = source.settings.get(theirs)
        if isinstance(value, int) and value != cfg[ours]:
            raise CheckpointError(f"{source.path}: the settings say {theirs}={value}, the weights have {cfg[ours]}")


def refuse_setting(source: Source, name: str, *allowed: Any) -> None:
    """Refuse a program's setting that changes numbers in a way that is not built.

    Raises:
        ConfigError: it has another value than these.
    """
    value = source.setting(name)
    if value is not None and value not in allowed:
        raise ConfigError(f"{source.path}: {name}={value!r} is not built; {' or '.join(map(repr, allowed))} is")
