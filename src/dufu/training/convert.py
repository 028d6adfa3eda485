"""`dufu convert`: other programs' checkpoints as Hugging Face folders, and back, by the tables that their names lie in."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dufu.config.instantiate import resolve
from dufu.errors import CheckpointError, ConfigError, nearest
from dufu.interchange.export import OutFolder, Read, dtype_of, foreign_tensors, write_json, write_weights
from dufu.interchange.folder import Tensors, is_folder, open_folder
from dufu.interchange.formats import FORMATS
from dufu.interchange.formats.base import FAMILIES, Format, Plan, Source, published, read_settings
from dufu.interchange.formats.left import LEFT, left_out, put_back
from dufu.interchange.formats.reading import Given, View
from dufu.interchange.source import ForeignWeights
from dufu.models.hf import complete, describe_folder, family_of
from dufu.models.names import Shape, Table
from dufu.parallel.region import Region
from dufu.training.pretrained import KEPT, TOKENIZER_FILES, torch_dtype

HF = "hf"
_HF_MARK = r"(embeddings\.word_embeddings|wte|embed_tokens|shared)\.weight"


@dataclass
class Model:
    """A model on its way.

    Args:
        target, cfg: our class and its complete arguments.
        shapes: of our parameters.
        read: fills memory with a region of one of them.
        dtype: of the source.
        notes: what a user should know, a line each.
        left: rows of foreign tensors that have no place in ours, by name and first row.
        table: of the source's names.
        origin: the source's folder, where it is Hugging Face's.
    """

    target: str
    cfg: dict[str, Any]
    shapes: dict[str, Shape]
    read: Read
    dtype: str
    table: Table
    notes: list[str] = field(default_factory=list)
    left: dict[str, Tensor] = field(default_factory=dict)
    origin: Path | None = None


@dataclass(frozen=True)
class Converted:
    """What was written.

    Args:
        path: where.
        bytes: of the tensors.
        dtype: of the tensors.
        target: our class of the model.
        notes: what a user should know, a line each.
    """

    path: Path
    bytes: int
    dtype: str
    target: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Options:
    """What may be said of a conversion.

    Args:
        model: a family, or a published size of one, such as bert_base; "" = as the names tell.
        config: a file with the program's own settings.
        given: settings that the source does not say, by our names or the program's.
        allow_unexpected: patterns of names in the source that are left out.
        exact_norms: multiply the weights of norms where the program's norm computes something else.
    """

    model: str = ""
    config: Path | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    allow_unexpected: Sequence[str] = ()
    exact_norms: bool = False


def format_of(name: str, option: str) -> Format | None:
    """Return a format by its name; None for Hugging Face's.

    Raises:
        ConfigError: there is none.
    """
    if name == HF:
        return None
    if name not in FORMATS:
        raise ConfigError(f"{option} {name}{nearest(name, [HF, *FORMATS])}")
    return FORMATS[name]


def parse_given(texts: Sequence[str]) -> dict[str, Any]:
    """Return settings of the form name=value.

    Raises:
        ConfigError: one has another form.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f'"{text}": name=value is wanted, such as num_attention_heads=12')
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return found


def convert(
    source: Path,
    out: Path,
    source_format: str,
    target_format: str = HF,
    options: Options | None = None,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    largest: int = 5 * 10**9,
) -> Converted:
    """Convert a checkpoint. To a Hugging Face folder one tensor is in memory at a time; the other formats are one file, made in memory.

    Args:
        source: a file or folder.
        out: what is written: a folder for "hf" and "megatron", otherwise a file.
        source_format, target_format: "hf" or a name in FORMATS.
        options: what the source does not say.
        dtype: of the result; None = the source's.
        tokenizer: a file or folder of a tokenizer that goes into the Hugging Face folder.
        largest: bytes of one file of the folder.

    Raises:
        DufuError: the source is damaged, of another format or says too little, or the model has no place in the format.
    """
    options = options or Options()
    theirs, wanted = format_of(source_format, "--from"), format_of(target_format, "--to")
    if theirs is None and wanted is None:
        raise ConfigError("--from hf --to hf: dufu export hf writes a Hugging Face folder from another")
    if out.exists() and (wanted is not None or not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists already; give another name, or remove it")
    if tokenizer is not None and wanted is not None:
        raise ConfigError(f"--tokenizer goes into a Hugging Face folder; --to {target_format} holds weights only")
    model = open_hf(source, options) if theirs is None else open_foreign(source, theirs, options)
    chosen = dtype or model.dtype
    model.read = _within_range(model.read, chosen)
    if wanted is None:
        size = _write_hf(model, out, chosen, tokenizer, largest, source_format)
    else:
        size = _write_foreign(model, wanted, out, chosen, options.exact_norms)
    return Converted(out, size, chosen, model.target, tuple(model.notes))


def table_of(source: Path, source_format: str, target_format: str, options: Options) -> str:
    """Return the table of names that a conversion goes by, a line each: our parameter, and what it is in the other format."""
    theirs, wanted = format_of(source_format, "--from"), format_of(target_format, "--to")
    model = open_hf(source, options) if theirs is None else open_foreign(source, theirs, options)
    if wanted is None:
        return str(model.table) if theirs else str(family_of(model.target).table(model.target, model.cfg))
    other = wanted.plan(model.target, model.cfg, None).table
    return str(other) if theirs is None else f"{model.table}\n\n{other}"


def open_hf(path: Path, options: Options) -> Model:
    """Open a Hugging Face folder.

    Raises:
        CheckpointError: it is none, or is damaged.
    """
    if not is_folder(path):
        raise CheckpointError(f"{path}: is no Hugging Face folder; of a run, dufu export hf makes one")
    for option, value in (("--config", options.config), ("--model", options.model)):
        if value:
            raise ConfigError(f"{option} {value}: config.json says what a Hugging Face folder holds")
    if options.given:
        raise ConfigError(f"{next(iter(options.given))}=…: config.json says what a Hugging Face folder holds")
    described = describe_folder(path)
    target, cfg = described.target, complete(described.target, described.cfg)
    shapes = _shapes(target, cfg)
    table = family_of(target).table(target, cfg)
    weights = ForeignWeights(open_folder(path), table, shapes)
    weights.compare(shapes, (), tuple(options.allow_unexpected))
    return Model(target, cfg, shapes, weights.read, torch_dtype(path), table, origin=path)


def open_foreign(path: Path, theirs: Format, options: Options) -> Model:
    """Open another program's checkpoint.

    Raises:
        DufuError: it is damaged, of another format, or does not say enough.
    """
    source = theirs.open(path)
    _check_names(source, theirs)
    if options.config is not None:
        found = read_settings(options.config)
        # LiBai keeps the model's settings within those of the run.
        inner = found.get("model")
        inner = inner.get("cfg", inner) if isinstance(inner, dict) else found
        source.settings.update(inner)
    family, size = _family(options.model)
    source.given = {**options.given, **({"size": size} if size else {})}
    described = theirs.describe(source, family)
    target = described.target
    arguments = set(inspect.signature(resolve(target).__init__).parameters) - {"self"}
    unknown = [name for name in options.given if name not in arguments and name not in theirs.settings]
    if unknown:
        raise ConfigError(f"{unknown[0]}=…: no setting of {target} or of {theirs.name}{nearest(unknown[0], arguments)}")
    given = {name: value for name, value in options.given.items() if name in arguments}
    cfg = complete(target, {**described.cfg, **given})
    notes = [note for note in described.notes if not any(note.startswith(f"assumed {name}=") for name in given)]
    plan, shapes = theirs.plan(target, cfg, source), _shapes(target, cfg)
    tensors = _without_zeros(Tensors(path, [*source.files, Given(path, {n: m.value for n, m in plan.made.items()})]), plan)
    weights = ForeignWeights(tensors, plan.table, shapes)
    weights.compare(shapes, (), tuple(options.allow_unexpected))
    factors = dict(plan.factors)
    if options.exact_norms:
        factors |= _norm_factors(theirs, shapes, target)
    elif theirs.norm_factor is not None:
        notes.append(
            "norms are copied as their own scripts copy them, though theirs computes a little else; --exact-norms changes that"
        )
    left = left_out(plan.table, tensors, shapes, set(plan.made))
    dtype = _dtype(tensors)
    return Model(target, cfg, shapes, _times(weights.read, factors), dtype, plan.table, notes + plan.notes, left)


def _check_names(source: Source, theirs: Format) -> None:
    names = [name for file in source.files for name in file.names()]
    if any(re.search(theirs.mark, name) for name in names):
        return
    marks = {name: form.mark for name, form in FORMATS.items() if form.mark != theirs.mark} | {HF: _HF_MARK}
    other = next((name for name, mark in marks.items() if any(re.search(mark, n) for n in names)), None)
    shown = ", ".join(names[:3]) or "none"
    what = f"they look like those of --from {other}" if other else f"it holds {shown}"
    if other == HF:
        what = "they look like Hugging Face's, which are read as they are in a folder with a config.json"
    raise CheckpointError(f"{source.path}: its names are not {theirs.name}'s; {what}")


def _family(model: str) -> tuple[str, str]:
    """Return a family, and the published size of it, that a name stands for."""
    if model in FAMILIES or not model:
        return model, ""
    sizes = {size: family for family in FAMILIES for size in published(family)}
    if model not in sizes:
        raise ConfigError(f"--model {model}{nearest(model, [*FAMILIES, *sizes])}")
    return sizes[model], model


def _shapes(target: str, cfg: Mapping[str, Any]) -> dict[str, Shape]:
    with torch.device("meta"):
        model: nn.Module = resolve(target)(**cfg)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _without_zeros(tensors: Tensors, plan: Plan) -> Tensors:
    """Return tensors without those that must be zeros, and are."""
    table, kept = replace(plan.table, copies={}, prefix=""), {}
    for name in tensors.names():
        if any(re.fullmatch(pattern, table.current_name(name, {})) for pattern in plan.zeros):
            rows = tensors.shape(name)[0]
            if bool(tensors.rows(name, 0, rows).any()):
                raise CheckpointError(f"{tensors.where}: {name} holds values, for which our model has no place")
        else:
            kept[name] = (tensors, name)
    return Tensors(tensors.where, [View(tensors.where, kept)])


def _norm_factors(form: Format, shapes: Mapping[str, Shape], target: str) -> dict[str, float]:
    """Return what the weights of norms are multiplied by.

    Raises:
        ConfigError: the format's norm is as ours.
    """
    if form.norm_factor is None:
        raise ConfigError(f"--exact-norms: the norm of {form.name} is as ours")
    return {name: form.norm_factor(shape[0]) for name, shape in shapes.items() if name.endswith("norm.weight")}


def _times(read: Read, factors: Mapping[str, float]) -> Read:
    if not factors:
        return read

    def reading(name: str, shape: Shape, region: Region, memory: Tensor) -> None:
        read(name, shape, region, memory)
        if name in factors:
            memory.mul_(factors[name])

    return reading


def _within_range(read: Read, dtype: str) -> Read:
    limit = torch.finfo(dtype_of(dtype)[1]).max

    def reading(name: str, shape: Shape, region: Region, memory: Tensor) -> None:
        read(name, shape, region, memory)
        if dtype == "float16" and memory.numel() and float(memory.abs().max()) > limit:
            raise CheckpointError(f"{name} holds a value beyond what float16 can hold; write float32 or bfloat16")

    return reading


def _dtype(tensors: Tensors) -> str:
    """Return the type of the largest tensor, or float32 where it is none of those that are written."""
    names = [name for name in tensors.names() if len(tensors.shape(name)) == 2 and not name.startswith("(")]
    largest = max(names, key=lambda name: tensors.shape(name)[0] * tensors.shape(name)[1], default="")
    found = str(tensors.dtype(largest)).removeprefix("torch.") if largest else "float32"
    return found if found in ("float32", "float16", "bfloat16") else "float32"


def _write_hf(model: Model, out: Path, dtype: str, tokenizer: Path | None, largest: int, source_format: str) -> int:
    family = family_of(model.target)
    table, fields = family.table(model.target, model.cfg), family.write(model.target, model.cfg)
    with OutFolder(out) as folder:
        size = write_weights(folder, table, model.shapes, model.read, dtype, largest)
        write_json(folder / "config.json", {**fields, "dtype": dtype, "torch_dtype": dtype})
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, folder, model.cfg["vocab_size"])
        if model.left:
            save_file({name: value.contiguous() for name, value in model.left.items()}, folder / LEFT, {"format": source_format})
            model.notes.append(
                f"rows with no place in the model are kept in {LEFT}, from which --to {source_format} puts them back: "
                + ", ".join(sorted(model.left)[:4])
            )
    return size


def _copy_tokenizer(tokenizer: Path, folder: Path, vocab_size: int) -> None:
    if tokenizer.is_dir():
        names = [name for name in KEPT if name not in ("config.json", "generation_config.json") and (tokenizer / name).is_file()]
        if not any(name in TOKENIZER_FILES for name in names):
            raise ConfigError(f"--tokenizer {tokenizer}: holds none of {', '.join(TOKENIZER_FILES)}")
        for name in names:
            shutil.copyfile(tokenizer / name, folder / name)
        return
    kinds = {".txt": "vocab.txt", ".json": "tokenizer.json", ".model": "tokenizer.model"}
    if not tokenizer.is_file() or tokenizer.suffix not in kinds or tokenizer.name == "dict.txt":
        raise ConfigError(
            f"--tokenizer {tokenizer}: a folder, a vocabulary (.txt, one word a line), a .json or a .model file is wanted"
        )
    if tokenizer.suffix == ".txt":
        with tokenizer.open("rb") as file:
            words = sum(1 for _ in file)
        if words > vocab_size:
            raise ConfigError(f"--tokenizer {tokenizer}: has {words} words, the model {vocab_size}")
    shutil.copyfile(tokenizer, folder / kinds[tokenizer.suffix])


def _write_foreign(model: Model, form: Format, out: Path, dtype: str, exact_norms: bool) -> int:
    plan, torch_type = form.plan(model.target, model.cfg, None), dtype_of(dtype)[1]
    factors = _norm_factors(form, model.shapes, model.target) if exact_norms else {}
    read = _times(model.read, {name: 1 / factor for name, factor in factors.items()})
    tensors: dict[str, Tensor] = {}
    for name, values in foreign_tensors(plan.table, model.shapes, read):
        if name in plan.made:
            same = torch.equal(values, plan.made[name].value)
            if plan.made[name].needed and not same:
                raise ConfigError(f"{form.name} has not got {name[1:-1]}, and this model's are not zeros; it has no form there")
            if not same:
                model.notes.append(f"left out: {name[1:-1]}, for which {form.name} has no place and which no real token uses")
            continue
        lacking = plan.rows.get(name, 0) - values.shape[0]
        if lacking > 0:
            values = torch.cat([values, values.new_zeros(lacking, *values.shape[1:])])
        tensors[name] = values.to(torch_type)
    put_back(_kept(model, form), tensors)
    size = sum(value.numel() * value.element_size() for value in tensors.values())
    if form.writes_copies:
        tensors.update({name: tensors[other] for name, other in plan.table.copies.items()})
    model.notes += plan.notes
    content = form.wrap(tensors, model.target, model.cfg)
    if form.place:
        with OutFolder(out) as folder:
            path = folder / form.place
            path.parent.mkdir(parents=True)
            torch.save(content, path)
            for name, text in form.beside.items():
                (folder / name).write_text(text, encoding="utf-8")
        return size
    part = out.with_name(f".{out.name}.part{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, part)
        os.replace(part, out)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(f"{out}: cannot be written ({error})") from None
    if form.write_settings is not None:
        write_json(out.with_name(f"{out.name}.json"), form.write_settings(model.target, model.cfg))
    return size


def _kept(model: Model, form: Format) -> dict[str, Tensor]:
    """Return the rows that an earlier conversion from this format kept beside the folder's weights."""
    path = None if model.origin is None else model.origin / LEFT
    if path is None or not path.is_file():
        return model.left
    try:
        with safe_open(str(path), "pt") as file:
            kind = (file.metadata() or {}).get("format")
            if kind not in FORMATS or FORMATS[kind].mark != form.mark:
                return {}
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from None
