"""Low-rank adapters (Hu et al., "LoRA", 2022; Liu et al., "DoRA", 2024) beside the linear layers of any model, which stays frozen.

A layer with stretches of its own, such as a fused query-key-value projection, gets an adapter for each. Where a layer is divided by
output features, so are the rows of its B; where by input features, the columns of its A. What passes between processes is the small
product A x alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.config.registry import register
from dufu.errors import ConfigError, nearest
from dufu.layers.dropout import name_places
from dufu.layers.initial import Constant, Normal
from dufu.layers.linear import Conv1D, Linear
from dufu.layers.split import WHOLE, Split, SplitRule
from dufu.models.huggingface.randomness import KeyedDropout, Keys
from dufu.models.huggingface.seams import ColumnConv1D, ColumnLinear, RowConv1D, RowLinear, gathered, is_conv1d, own_features

A, B, MAGNITUDE = "lora_a", "lora_b", "lora_m"  # parameters that an adapted layer has besides its own
# What the stretches of a fused layer are called, by the layer's own name.
SECTIONS = {
    "query_key_value": ("query", "key", "value"),
    "key_value": ("key", "value"),
    "gate_up": ("gate", "up"),
    "c_attn": ("query", "key", "value"),
}


@dataclass(frozen=True)
class Form:
    """How a linear layer computes and is divided.

    Args:
        kind: divided by output features, by input features, or not.
        inputs, outputs: features of the whole layer.
        sections: stretches of the output that are divided each by itself.
        gathered: whether the divided output is put together again.
        whole_input: whether the divided input comes whole.
        turned: whether the weight is stored as (in, out).
    """

    kind: Literal["data", "col", "row"]
    inputs: int
    outputs: int
    sections: tuple[int, ...]
    gathered: bool = False
    whole_input: bool = False
    turned: bool = False


def form_of(module: nn.Module) -> Form | None:
    """Return the form of a linear layer; None of another module."""
    rules: dict[str, SplitRule] = getattr(module, "splits", {})
    rule = rules.get("weight")
    fused = rule.sections if rule is not None and rule.sections else None
    if isinstance(module, Linear):
        outputs = module.out_features
        return Form(module.parallel, module.in_features, outputs, fused or (outputs,), turned=isinstance(module, Conv1D))
    if is_conv1d(module):
        kind: Any = "col" if isinstance(module, ColumnConv1D) else "row" if isinstance(module, RowConv1D) else "data"
        outputs = int(module.nf)  # type: ignore[arg-type]
        return Form(kind, int(module.nx), outputs, fused or (outputs,), turned=True)  # type: ignore[arg-type]
    if isinstance(module, ColumnLinear):
        return Form("col", module.in_features, module.out_features, fused or (module.out_features,), gathered=module.gathered)
    if isinstance(module, RowLinear):
        return Form("row", module.in_features, module.out_features, (module.out_features,), whole_input=module.whole_input)
    if isinstance(module, nn.Linear):
        return Form("data", module.in_features, module.out_features, (module.out_features,))
    return None


@dataclass
class Site:
    """An adapted layer.

    Args:
        name: of the layer.
        form: of the layer.
        chosen: numbers of the stretches that have an adapter.
        rank: of each adapter.
        scale: factor on B A.
    """

    name: str
    form: Form
    chosen: tuple[int, ...]
    rank: int
    scale: float

    def stretches(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield of each adapter: its number, the layer's first row, the number of rows, the first row of B."""
        row = first = 0
        for number, rows in enumerate(self.form.sections):
            if number in self.chosen:
                yield self.chosen.index(number), row, rows, first
                first += rows
            row += rows


class _Adapted:
    """What an adapted layer has besides its own class."""

    site: Site
    lora_a: Tensor
    lora_b: Tensor
    lora_m: Tensor | None
    lora_dropout: KeyedDropout | None
    weight: Tensor
    bias: Tensor | None

    def added(self, x: Tensor, split: Split) -> Tensor:
        """Return scale · B A x: (…, in or a part) → (…, out or a part)."""
        form, site = self.site.form, self.site
        if form.whole_input and split.size > 1:
            x = own_features(x, split)
        if self.lora_dropout is not None:
            x = self.lora_dropout(x)
        small = functional.linear(x, self.lora_a)
        small = split.enter(small) if form.kind == "col" else split.leave(small) if form.kind == "row" else small
        parts = iter(zip(small.split(site.rank, -1), self.lora_b.split([n // self._parts(split) for n in self._rows()])))
        out = [
            functional.linear(*next(parts)) * site.scale
            if number in site.chosen
            else small.new_zeros((*small.shape[:-1], rows // self._parts(split)))
            for number, rows in enumerate(form.sections)
        ]
        return out[0] if len(out) == 1 else torch.cat(out, -1)

    def _rows(self) -> list[int]:
        return [self.site.form.sections[number] for number in self.site.chosen]

    def _parts(self, split: Split) -> int:
        return split.size if self.site.form.kind == "col" else 1

    def factor(self, split: Split) -> Tensor:
        """Return DoRA's factor on each output feature here: the magnitude over the norm of W + scale · B A, whose gradient is left out."""
        form, site, parts = self.site.form, self.site, self._parts(split)
        with torch.no_grad():
            weight = (self.weight.t() if form.turned else self.weight).float()
            rows = [n // parts for n in form.sections]
            whole = weight.clone()
            starts = [sum(rows[:number]) for number in site.chosen]
            for start, a, b in zip(starts, self.lora_a.split(site.rank), self.lora_b.split([rows[n] for n in site.chosen])):
                whole[start : start + len(b)] += site.scale * (b.float() @ a.float())
            norms = torch.stack((weight.square().sum(1), whole.square().sum(1)))
            if form.kind == "row":
                norms = split.sum_(norms.contiguous())
            base, combined = norms.sqrt()
        assert self.lora_m is not None
        changes = iter(self.lora_m.float().split([rows[n] for n in site.chosen]))
        change = torch.cat([next(changes) if n in site.chosen else base.new_zeros(length) for n, length in enumerate(rows)])
        factor: Tensor = (base + change) / combined
        return factor


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Any:
        split: Split = getattr(self, "split", WHOLE)
        result = original(self, x)
        y, *rest = result if isinstance(result, tuple) else (result,)
        delta = self.added(x, split)
        if self.lora_m is None:
            y = y + (gathered(delta, split) if self.site.form.gathered else delta)
        elif self.site.form.gathered:
            raise AssertionError("refused before")
        else:
            bias = None if self.bias is None or rest else self.bias
            bare = y if bias is None else y - bias
            y = ((bare + delta) * self.factor(split)).to(y.dtype)
            y = y if bias is None else y + bias
        return (y, *rest) if rest else y

    return forward


@dataclass
class Lora:
    """Adapters for the linear layers that patterns name; everything else is frozen.

    Args:
        patterns: names of layers, or of the stretches of fused ones (`query`, `key`, `value`, `gate`, `up`), such as
            "layers.*.attention.query_key_value.query" or, as any beginning may be left out, "query". `*` stands for any text.
        rank: of each adapter.
        alpha: B A is multiplied by alpha / rank.
        dropout: on the adapters' input.
        variant: "lora", or "dora", which also learns each output feature's magnitude. Of DoRA's magnitude the change is the
            parameter; it begins as zero.
        train: patterns of other parameters that are trained, and saved, as well, such as a new head.
        folder: of PEFT, from which the adapters begin; patterns, rank, alpha and variant are then the folder's.
    """

    patterns: Sequence[str] = ()
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    variant: Literal["lora", "dora"] = "lora"
    train: Sequence[str] = ()
    folder: str | None = None
    sites: dict[str, Site] = field(default_factory=dict, init=False)
    ranks: dict[str, tuple[int, float]] = field(default_factory=dict, init=False)  # of a layer, where a folder says; and the scale

    def __post_init__(self) -> None:
        if self.variant not in ("lora", "dora"):
            raise ConfigError(f'train.adapter.variant="{self.variant}": "lora" or "dora"')
        if self.rank < 1:
            raise ConfigError(f"train.adapter.rank={self.rank}: at least 1")
        if isinstance(self.patterns, str) or (not self.patterns and self.folder is None):
            raise ConfigError('train.adapter.patterns: a list of the layers to adapt, such as ["query", "value"]')
        if self.folder is not None and self.patterns:
            raise ConfigError("train.adapter: patterns or folder, not both")

    def apply(self, model: nn.Module) -> None:
        """Freeze a model and give the chosen layers adapters, in place; before the model is laid out.

        Raises:
            ConfigError: a pattern that names nothing.
        """
        model.requires_grad_(False)
        modules = dict(model.named_modules())
        names = {**_layers(modules)}
        used: set[str] = set()
        keys = getattr(model, "keys", None) or Keys()
        for name, form in names.items():
            chosen = tuple(
                n for n, part in enumerate(part_names(name, form)) if self._matches(part, used) or self._matches(name, used)
            )
            if chosen:
                self._adapt(name, modules[name], form, chosen, keys)
        parameters = dict(model.named_parameters())
        for pattern in self.train:
            found = [n for n in parameters if _means(pattern, n)]
            if not found:
                raise ConfigError(f"train.adapter.train: {pattern} names no parameter{nearest(pattern, list(parameters))}")
            for n in found:
                parameters[n].requires_grad_(True)
        unused = [pattern for pattern in self.patterns if pattern not in used]
        if unused:
            known = [part for name, form in names.items() for part in part_names(name, form)]
            shown = ", ".join(dict.fromkeys(part.rsplit(".", 1)[-1] for part in known))
            raise ConfigError(
                f"train.adapter.patterns: {unused[0]} names no linear layer{nearest(unused[0], known)}; there are {shown}"
            )
        if self.dropout > 0.0:
            _set_keys(model, keys)
            name_places(model)

    def _matches(self, name: str, used: set[str]) -> bool:
        found = [pattern for pattern in self.patterns if _means(pattern, name)]
        used.update(found)
        return bool(found)

    def _adapt(self, name: str, module: nn.Module, form: Form, chosen: tuple[int, ...], keys: Keys) -> None:
        if self.variant == "dora" and form.gathered:
            raise ConfigError(f"{name}: dora is not built for a layer whose divided output is put together again; use lora")
        rank, scale = self.ranks.get(name, (self.rank, self.alpha / self.rank))
        site = self.sites[name] = Site(name, form, chosen, rank, scale)
        rows = tuple(form.sections[number] for number in chosen)
        weight: Tensor = module.weight  # type: ignore[assignment]
        module.register_parameter(A, nn.Parameter(weight.new_empty(len(chosen) * rank, form.inputs)))
        module.register_parameter(B, nn.Parameter(weight.new_empty(sum(rows), rank)))
        dora = nn.Parameter(weight.new_empty(sum(rows))) if self.variant == "dora" else None
        module.register_parameter(MAGNITUDE, dora)
        # the spread of PEFT's uniform beginning
        begin = {A: Normal((3.0 * form.inputs) ** -0.5), B: Constant(0.0), MAGNITUDE: Constant(0.0)}
        module.initial = {**getattr(module, "initial", {}), **begin}  # type: ignore[assignment]
        if form.kind == "col":
            ours = {B: SplitRule(0, rows), MAGNITUDE: SplitRule(0, rows)}
        else:
            ours = {A: SplitRule(1)} if form.kind == "row" else {}
        if ours:
            module.splits = {**module.splits, **ours}  # type: ignore[assignment, dict-item]
        dropout = KeyedDropout(self.dropout, keys, f"{name}.lora_dropout") if self.dropout > 0.0 else None
        if dropout is not None:
            dropout.divided = form.kind == "row"
        module.lora_dropout = dropout  # type: ignore[assignment]
        module.site = site  # type: ignore[assignment]
        module.__class__ = type(
            f"Adapted{type(module).__name__}", (_Adapted, type(module)), {"forward": _forward(type(module).forward)}
        )


register("adapter", "lora")(Lora)


def _layers(modules: dict[str, nn.Module]) -> dict[str, Form]:
    found = {name: form_of(module) for name, module in modules.items()}
    return {name: form for name, form in found.items() if form is not None}


def part_names(name: str, form: Form) -> list[str]:
    """Return the names of a layer's stretches; that of the layer where it has one."""
    if len(form.sections) == 1:
        return [name]
    known = SECTIONS.get(name.rsplit(".", 1)[-1], ())
    return [f"{name}.{known[n] if len(known) == len(form.sections) else n}" for n in range(len(form.sections))]


def _means(pattern: str, name: str) -> bool:
    return re.fullmatch(r"(?:.*\.)?" + ".*".join(map(re.escape, pattern.split("*"))), name) is not None


def _set_keys(model: nn.Module, keys: Keys) -> None:
    """Let each unit take note of its batch's keys, also when it is recomputed."""
    units: dict[str, nn.Module] = model.units()  # type: ignore[operator]
    for unit in units.values():
        original = unit.forward

        def forward(state: Any, batch: Any, original: Callable[..., Any] = original) -> Any:
            keys.now = batch.keys
            return original(state, batch)

        unit.forward = forward  # type: ignore[method-assign]


def is_adapter(name: str) -> bool:
    """Say whether a parameter is an adapter's."""
    return name.rsplit(".", 1)[-1] in (A, B, MAGNITUDE)


__all__ = ["Form", "Lora", "Site", "form_of", "is_adapter", "part_names"]
