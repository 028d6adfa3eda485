"""Adapters out to and in from folders that PEFT reads: `adapter_config.json`, `adapter_model.safetensors`, in Hugging Face's names.

Our adapters belong to stretches of our layers, PEFT's to Hugging Face's layers; the table of names says which rows are which. Where several
of ours lie in one of theirs, as in GPT-2's fused projection, theirs has the sum of their ranks and a B of blocks: the same product.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from dufu.config.instantiate import instantiate
from dufu.errors import CheckpointError, ConfigError, NotBuiltError
from dufu.interchange.export import OutFolder, write_json
from dufu.interchange.files import write_tensors
from dufu.interchange.source import WeightSource
from dufu.interchange.tensor_file import SafetensorsFile
from dufu.models.lora import MAGNITUDE, A, B, Form, Lora, Site, form_of, is_adapter, part_names
from dufu.models.names import Table
from dufu.parallel.region import whole_region

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Span:
    """Rows of a Hugging Face layer's output that are rows of one of ours.

    Args:
        layer: theirs.
        row: our first row.
        rows: how many.
        start: their first row.
    """

    layer: str
    row: int
    rows: int
    start: int


def spans(table: Table, name: str, form: Form) -> list[Span]:
    """Return where the output rows of one of our layers lie in Hugging Face's layers.

    Raises:
        NotBuiltError: in a stack of experts.
    """
    parts = table.rule_of(f"{name}.weight").parts
    if form.turned:  # our weight is theirs, both stored as (in, out)
        return [Span(parts[0].name.removesuffix(".weight"), 0, form.outputs, 0)]
    found = []
    for part in parts:
        if part.matrix is not None:
            raise NotBuiltError(f"{name}: adapters of a stack of experts have no place in a folder of PEFT")
        rows = form.outputs - part.row if part.rows is None else part.rows
        found.append(Span(part.name.removesuffix(".weight"), part.row, rows, part.start))
    return found


def _overlaps(site: Site, found: list[Span]) -> list[tuple[int, Span, int]]:
    """Yield (number of our adapter, the rows that it has in common with a span, the first of them in B)."""
    out = []
    for number, row, rows, first in site.stretches():
        for span in found:
            low, high = max(row, span.row), min(row + rows, span.row + span.rows)
            if low < high:
                out.append((number, Span(span.layer, low, high - low, span.start + low - span.row), first + low - row))
    return out


def export_adapter(source: str | Path, out: str | Path) -> Path:
    """Write a run's adapters as a folder that PEFT reads; return it.

    Args:
        source: a run's folder, or a checkpoint.
        out: a new folder.

    Raises:
        DufuError: the run trained no adapters, or other parameters besides, or its model has no counterpart in Hugging Face's formats.
    """
    from dufu.models.hf import family_of
    from dufu.training.adapters import AdaptedSource, adapter_of
    from dufu.training.checkpoint import CheckpointReader, find_checkpoint
    from dufu.training.export_hf import shapes_of
    from dufu.training.pretrained import named_model, with_base
    from dufu.training.resuming import saved_config

    reader = CheckpointReader(find_checkpoint(source))
    config = saved_config(reader)
    adapter = adapter_of(config) if "adapter" in reader.state else None
    if adapter is None:
        raise CheckpointError(f"{reader.folder}: holds whole weights and no adapters; dufu export hf writes them")
    others = [name for name in reader.names() if not is_adapter(name)]
    if others:
        raise NotBuiltError(f"{reader.folder}: {others[0]} was trained as well, and is not written into a folder of PEFT yet")
    target, cfg = named_model(config.model)
    table = family_of(target).table(target, cfg)
    with torch.device("meta"):
        adapter.apply(instantiate(config.model))
    shapes = shapes_of(config)
    weights = with_base(reader, config.model, shapes)
    assert isinstance(weights, AdaptedSource)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, tuple[int, float]] = {}
    for name, site in adapter.sites.items():
        found = spans(table, name, site.form)
        a, b = weights.saved(site, A), weights.saved(site, B)
        magnitude = _magnitude(weights, site, shapes[f"{name}.weight"]) if adapter.variant == "dora" else None
        for layer in dict.fromkeys(span.layer for span in found):
            there = [item for item in _overlaps(site, found) if item[1].layer == layer]
            numbers = list(dict.fromkeys(number for number, _, _ in there))
            if not numbers:
                continue
            height = max(span.start + span.rows for span in found if span.layer == layer)
            rank = site.rank
            theirs = torch.zeros(height, rank * len(numbers))
            for number, span, first in there:
                left = numbers.index(number) * rank
                theirs[span.start : span.start + span.rows, left : left + rank] = b[first : first + span.rows]
            tensors[f"{_PREFIX}{layer}.lora_A.weight"] = torch.cat([a[n * rank : (n + 1) * rank] for n in numbers])
            tensors[f"{_PREFIX}{layer}.lora_B.weight"] = theirs
            ranks[layer] = rank * len(numbers), site.scale
            if magnitude is not None:
                whole = torch.zeros(height)
                for span in found:
                    if span.layer == layer:
                        whole[span.start : span.start + span.rows] = magnitude[span.row : span.row + span.rows]
                tensors[f"{_PREFIX}{layer}.lora_magnitude_vector"] = whole
    described = _describe(adapter, ranks, str(reader.state["adapter"]["from"]), _fused(table, adapter))
    with OutFolder(Path(out)) as folder:
        forms = {name: ("F32", tuple(value.shape)) for name, value in tensors.items()}
        write_tensors(folder / WEIGHTS, forms, (_array(value) for value in tensors.values()), {"format": "pt"})
        write_json(folder / CONFIG, described)
    return Path(out)


def _array(value: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = value.contiguous().numpy()
    return found


def _fused(table: Table, adapter: Lora) -> bool:
    """Say whether Hugging Face stores the adapted layers' weights as (in, out)."""
    return any(
        site.form.turned or any(part.transposed for part in table.rule_of(f"{name}.weight").parts)
        for name, site in adapter.sites.items()
    )


def _magnitude(weights: Any, site: Site, shape: tuple[int, ...]) -> Tensor:
    """Return DoRA's magnitude of each output row of one of our layers."""
    whole = _norms(weights.base, f"{site.name}.weight", shape, site.form)
    grown: Tensor = weights.saved(site, MAGNITUDE)
    for _, row, rows, first in site.stretches():
        whole[row : row + rows] += grown[first : first + rows]
    return whole


def _norms(base: WeightSource | None, name: str, shape: tuple[int, ...], form: Form) -> Tensor:
    if base is None:
        raise CheckpointError(f"{name}: DoRA's magnitudes need the base weights; this run began with random ones")
    weight = torch.empty(shape)
    base.read(name, shape, whole_region(shape), weight.view(-1))
    norms: Tensor = (weight.t() if form.turned else weight).norm(dim=1)
    return norms


def _describe(adapter: Lora, ranks: Mapping[str, tuple[int, float]], base: str, fused: bool) -> dict[str, Any]:
    usual = max(rank for rank, _ in ranks.values())
    scale = next(scale for _, scale in ranks.values())
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base or None,
        "r": usual,
        "lora_alpha": scale * usual,
        "lora_dropout": adapter.dropout,
        "target_modules": sorted(ranks),
        "rank_pattern": {layer: rank for layer, (rank, _) in sorted(ranks.items()) if rank != usual},
        "alpha_pattern": {layer: scale * rank for layer, (rank, _) in sorted(ranks.items()) if rank != usual},
        "use_dora": adapter.variant == "dora",
        "fan_in_fan_out": fused,
        "bias": "none",
        "inference_mode": True,
    }


class PeftFolder:
    """Adapters in a folder that PEFT wrote.

    Args:
        folder: it.

    Raises:
        CheckpointError: a file is missing or damaged. NotBuiltError: another method than LoRA and DoRA, or a setting that is not built.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: has no {CONFIG}; it is no folder of PEFT") from None
        except ValueError as error:
            raise CheckpointError(f"{folder / CONFIG}: not readable as JSON ({error})") from None
        config = self.config
        if config.get("peft_type") != "LORA":
            raise NotBuiltError(f"{folder}: peft_type={config.get('peft_type')!r} is not built; LORA is")
        for name, usual in (("bias", "none"), ("modules_to_save", None), ("use_rslora", False), ("lora_bias", False)):
            if config.get(name, usual) not in (usual, None, [], False):
                raise NotBuiltError(f"{folder}: {name}={config[name]!r} is not built")
        self.file = SafetensorsFile(folder / WEIGHTS)

    @property
    def layers(self) -> set[str]:
        """Return Hugging Face's layers that have an adapter."""
        return {n.removeprefix(_PREFIX).removesuffix(".lora_A.weight") for n in self.file.names() if n.endswith(".lora_A.weight")}

    def tensor(self, layer: str, leaf: str) -> Tensor:
        """Return a tensor of a layer's adapter, float32."""
        name = f"{_PREFIX}{layer}.{leaf}"
        if name not in self.file.names():
            raise CheckpointError(f"{self.folder / WEIGHTS}: has no {name}")
        shape = self.file.shape(name)
        values = self.file.rows(name, 0, shape[0]).float()
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(f"{self.folder / WEIGHTS}: {name} holds values that are no finite numbers")
        return values if len(shape) > 1 else values.view(-1)

    def rank(self, layer: str) -> int:
        """Return the rank of a layer's adapter."""
        return self.file.shape(f"{_PREFIX}{layer}.lora_A.weight")[0]

    def scale(self, layer: str) -> float:
        """Return the factor on B A."""
        alpha = self._setting("alpha_pattern", layer, self.config.get("lora_alpha", 8))
        return float(alpha) / self.rank(layer)

    def _setting(self, name: str, layer: str, usual: Any) -> Any:
        for pattern, value in (self.config.get(name) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", layer):
                return value
        return usual


def settle(adapter: Lora, config: DictConfig) -> None:
    """Let adapters that begin with a folder of PEFT have its layers, ranks and variant.

    Raises:
        CheckpointError: a layer of the folder is none of the model's. ConfigError: the run does not begin with weights.
    """
    from dufu.models.hf import family_of
    from dufu.training.pretrained import named_model

    assert adapter.folder is not None
    if not config.train.load_weight:
        raise ConfigError("train.adapter.folder: adapters belong to weights; name them with train.load_weight, or model=FOLDER")
    folder = PeftFolder(Path(adapter.folder))
    target, cfg = named_model(config.model)
    table = family_of(target).table(target, cfg)
    with torch.device("meta"):
        model: nn.Module = instantiate(config.model)
    left, patterns = folder.layers, []
    for name, module in model.named_modules():
        form = form_of(module)
        if form is None or not any(rule.ours == f"{name}.weight" for rule in table.rules):
            continue
        found = spans(table, name, form)
        row = 0
        for part, rows in zip(part_names(name, form), form.sections):
            layers = {s.layer for s in found if s.row < row + rows and row < s.row + s.rows}
            row += rows
            if layers <= folder.layers:
                patterns.append(part)
                left = left - layers
                if len(layers) > 1:
                    raise NotBuiltError(
                        f"{folder.folder}: {part} is made of {', '.join(sorted(layers))}, whose adapters cannot be joined"
                    )
                (layer,) = layers
                adapter.ranks[name] = folder.rank(layer), folder.scale(layer)
    if left:
        raise CheckpointError(f"{folder.folder}: adapts {sorted(left)[0]}, which is no linear layer of {target}")
    adapter.patterns, adapter.variant = patterns, "dora" if folder.config.get("use_dora") else "lora"


def first_adapters(adapter: Lora, table: Table, base: WeightSource, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the adapters' parameters as a folder of PEFT holds them."""
    assert adapter.folder is not None
    folder = PeftFolder(Path(adapter.folder))
    made: dict[str, Tensor] = {}
    for name, site in adapter.sites.items():
        found = spans(table, name, site.form)
        a = torch.zeros(len(site.chosen) * site.rank, site.form.inputs)
        b = torch.zeros(sum(site.form.sections[n] for n in site.chosen), site.rank)
        m = torch.zeros(len(b))
        norms = _norms(base, f"{name}.weight", shapes[f"{name}.weight"], site.form) if adapter.variant == "dora" else None
        for number, span, first in _overlaps(site, found):
            a[number * site.rank : (number + 1) * site.rank] = folder.tensor(span.layer, "lora_A.weight")
            b[first : first + span.rows] = folder.tensor(span.layer, "lora_B.weight")[span.start : span.start + span.rows]
            if norms is not None:
                theirs = folder.tensor(span.layer, "lora_magnitude_vector")[span.start : span.start + span.rows]
                m[first : first + span.rows] = theirs - norms[span.row : span.row + span.rows]
        made[f"{name}.{A}"], made[f"{name}.{B}"] = a, b
        if norms is not None:
            made[f"{name}.{MAGNITUDE}"] = m
    return made


__all__ = ["PeftFolder", "export_adapter", "first_adapters", "settle"]
