"""Layouts as text: `dp2xtp2`, `zero3xpp2(zbv)`, `tp2xpp2:recompute+O1`. The tables here are the grammar, and what `dufu show layouts` prints."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dufu.config.schema import defaults
from dufu.errors import LayoutError, nearest
from dufu.parallel.layout import CONTEXT_METHODS, SCHEDULES

ONE = ("one", "one process")


class Factor(NamedTuple):
    """A factor of a layout: how it is written and what it means."""

    form: str
    meaning: str


FACTORS = {
    "dp": Factor("dpN", "N processes share the global batch"),
    "zero": Factor(
        "zeroS, zeroS(dpN), zeroS(dpN,shardM)",
        "dp2, or dpN, with ZeRO: S = 1 shards optimizer state, 2 gradients too, 3 weights too; over groups of M",
    ),
    "tp": Factor("tpN", "N processes share each layer's matrices"),
    "sp": Factor("sp, spN", "tp2, or tpN, whose processes also share positions between the matrices (sequence parallel)"),
    "pp": Factor(
        "ppN, ppN(SCHEDULE), ppN(SCHEDULE,virtualV)", f"N processes share the chain of layers; schedules: {', '.join(SCHEDULES)}"
    ),
    "cp": Factor("cpN, cpN(METHOD)", f"N processes share each sequence; methods: {', '.join(CONTEXT_METHODS)}"),
    "ep": Factor("epN", "of the dp × cp processes N share the experts; alone it brings dpN with it"),
}
OPTIONS: dict[str, tuple[str, ...]] = {
    "recompute": ("train.activation_checkpoint.enabled=true",),
    "selective": ("train.activation_checkpoint.enabled=true", "train.activation_checkpoint.mode=selective"),
    "compile": ("graph.enabled=true",),
    "O1": ("train.amp.enabled=true", "train.amp.level=O1"),
    "O2": ("train.amp.enabled=true", "train.amp.level=O2"),
    "O3": ("train.amp.enabled=true", "train.amp.level=O3"),
    "bf16": ("train.amp.enabled=true", "train.amp.dtype=bf16"),
    "fp16": ("train.amp.enabled=true", "train.amp.dtype=fp16"),
}
NUMBERED_OPTIONS: dict[str, tuple[str, ...]] = {
    "accum": ("train.num_accumulation_steps={}", "train.train_micro_batch_size=null"),
    "micro": ("train.train_micro_batch_size={}", "train.num_accumulation_steps=null"),
    "batch": ("train.global_batch_size={}",),
}


class Limit(NamedTuple):
    """What cannot be combined, why, and a layout of a shipped recipe that is refused for it."""

    what: str
    reason: str
    recipe: str
    example: str


LIMITS = (
    Limit("dp × zero", "ZeRO shards over the data-parallel processes and brings them with it: zeroS(dpN)", "gpt2_tiny", "dp4xzero3"),
    Limit("tp × sp", "sp is tp with shared positions: spN alone", "gpt2_tiny", "tp2xsp2"),
    Limit("tpN, spN", "each process has whole heads and equal widths: N divides both", "gpt2_tiny", "tp3"),
    Limit("zeroS(dpN,shardM)", "groups of M share one copy: M divides the dp × cp processes", "gpt2_tiny", "zero3(dp4,shard3)"),
    Limit("ppN(…,virtualV)", "each of the N × V stages has a layer of its own", "gpt2_tiny", "pp4"),
    Limit("ppN(gpipe), ppN(1f1b)", "one stage a process: virtual1", "gpt2_tiny", "pp2(1f1b,virtual2)"),
    Limit("ppN(zbv), ppN(dualpipev)", "a V of two stages a process: virtual2", "gpt2_tiny", "pp2(zbv,virtual1)"),
    Limit("cpN(all_to_all)", "heads change places with positions: N × tp divides the heads", "gpt2_tiny", "cp8(all_to_all)"),
    Limit("epN", "experts divide over replicas: N divides dp × cp", "gpt2_moe_tiny", "dp3xep2"),
    Limit("epN", "experts divide: N divides their number, and the model has some", "gpt2_tiny", "ep2"),
)  # fmt: skip

_SIZES = ("data", "tensor", "pipeline", "context", "expert")
_FACTOR = re.compile(r"([a-z]+)(\d*)((?:\([^()]*\))*)")
_RESET = (
    *(f"train.dist.{name}_parallel_size={'null' if name == 'data' else 1}" for name in _SIZES),
    "train.dist.sequence_parallel=false",
    *defaults("train.zero_optimization"),
)


@dataclass(frozen=True)
class LayoutText:
    """A layout read from text.

    Args:
        text: as it was written.
        world: number of processes.
        dist: `key=value` settings of the layout itself; whatever layout a config names is replaced.
        options: `key=value` settings after the colon.
        data: processes that share the global batch.
    """

    text: str
    world: int
    dist: tuple[str, ...]
    options: tuple[str, ...] = ()
    data: int = 1

    @property
    def overrides(self) -> list[str]:
        """Return all settings."""
        return [*self.dist, *self.options]


def parse_layouts(text: str) -> list[LayoutText]:
    """Return the layouts of a list separated by commas (those inside parentheses separate settings).

    Raises:
        LayoutError: a text that is no layout, the same one twice, or none at all.
    """
    parts = [part.strip() for part in re.split(r",(?![^()]*\))", text) if part.strip()]
    if not parts:
        raise LayoutError("--layouts names no layout; give some, such as dp2,tp2 (`dufu show layouts` prints the grammar)")
    twice = next((part for part in parts if parts.count(part) > 1), None)
    if twice:
        raise LayoutError(f'--layouts names "{twice}" twice')
    return [parse_layout(part) for part in parts]


def parse_layout(text: str) -> LayoutText:
    """Return the layout that a text describes; the inverse of `str(ParallelLayout)`.

    Raises:
        LayoutError: it describes none; the message names the nearest that does.
    """
    product, _, options = text.partition(":")
    settings = _options(options, text) if ":" in text else ()
    if product in ONE:
        return LayoutText(text, 1, _RESET, settings)
    return _Reading(text, product).result(settings)


class _Reading:
    """The factors of one layout, read one after another."""

    def __init__(self, text: str, product: str) -> None:
        self.text = text
        self.sizes: dict[str, int] = {}
        self.settings: list[str] = []
        for factor in re.split(r"x(?![^()]*\))", product):
            self._read(factor)

    def _fail(self, message: str) -> LayoutError:
        return LayoutError(f'layout "{self.text}": {message}')

    def _read(self, factor: str) -> None:
        match = _FACTOR.fullmatch(factor)
        if match is None or match[1] not in FACTORS:
            raise self._fail(f'"{factor}" is no factor{_nearest_factor(factor)}')
        name, digits, inside = match.groups()
        words = [word.strip() for group in re.findall(r"\(([^()]*)\)", inside) for word in group.split(",")]
        number = int(digits) if digits else 2 if name == "sp" else 0
        if number < (1 if name == "zero" else 2):
            low = {"zero": "a stage, such as zero1"}.get(name, f"a number of processes from 2, such as {name}2")
            raise self._fail(f'"{factor}" needs {low}')
        if name in self.sizes:
            raise self._fail(f"{name} stands there twice")
        self.sizes[name] = number
        getattr(self, f"_{name}")(number, words, factor)

    def _plain(self, words: Sequence[str], factor: str) -> None:
        if words:
            raise self._fail(f'"{factor}" takes nothing in parentheses')

    def _dp(self, number: int, words: Sequence[str], factor: str) -> None:
        self._plain(words, factor)

    def _tp(self, number: int, words: Sequence[str], factor: str) -> None:
        self._plain(words, factor)

    def _ep(self, number: int, words: Sequence[str], factor: str) -> None:
        self._plain(words, factor)

    def _sp(self, number: int, words: Sequence[str], factor: str) -> None:
        self._plain(words, factor)
        self.settings.append("train.dist.sequence_parallel=true")

    def _zero(self, stage: int, words: Sequence[str], factor: str) -> None:
        if stage > 3:
            raise self._fail(f'"{factor}": ZeRO has stages 1 to 3; nearest: zero3')
        self.settings += ["train.zero_optimization.enabled=true", f"train.zero_optimization.stage={stage}"]
        for word in words:
            match = re.fullmatch(r"(dp|shard)([1-9]\d*)", word)
            if match is None:
                raise self._fail(f'"{word}" in "{factor}"; zeroS takes dpN and shardM, such as zero{stage}(dp4,shard2)')
            if match[1] == "dp":
                self.sizes["zero dp"] = int(match[2])
            else:
                self.settings.append(f"train.zero_optimization.shard_size={match[2]}")

    def _pp(self, number: int, words: Sequence[str], factor: str) -> None:
        for word in words:
            match = re.fullmatch(r"virtual([1-9]\d*)", word)
            if match:
                self.settings.append(f"train.dist.pipeline_virtual_stages={match[1]}")
            elif word in SCHEDULES:
                self.settings.append(f"train.dist.pipeline_schedule={word}")
            else:
                raise self._fail(f'no pipeline schedule is called "{word}"{nearest(word, SCHEDULES)}')

    def _cp(self, number: int, words: Sequence[str], factor: str) -> None:
        for word in words:
            if word not in CONTEXT_METHODS:
                raise self._fail(f'no method of context parallelism is called "{word}"{nearest(word, CONTEXT_METHODS)}')
            self.settings.append(f"train.dist.context_parallel_method={word}")

    def result(self, options: tuple[str, ...]) -> LayoutText:
        """Return what was read."""
        sizes = self.sizes
        if "zero" in sizes and "dp" in sizes:
            stage, n = sizes["zero"], sizes["dp"]
            raise self._fail(f"ZeRO brings its data-parallel processes with it; write zero{stage}(dp{n})")
        if "sp" in sizes and "tp" in sizes:
            raise self._fail(f"sp is tp with shared positions; write sp{sizes['tp']} alone")
        tensor, pipeline, context = sizes.get("tp") or sizes.get("sp", 1), sizes.get("pp", 1), sizes.get("cp", 1)
        expert = sizes.get("ep", 1)
        data = sizes.get("zero dp", 2) if "zero" in sizes else sizes.get("dp", expert if context % expert else 1)
        values = {"data": data, "tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
        settings = [f"train.dist.{name}_parallel_size={size}" for name, size in values.items()]
        return LayoutText(self.text, data * tensor * pipeline * context, (*_RESET, *settings, *self.settings), options, data)


def _nearest_factor(factor: str) -> str:
    """Return a hint: the nearest factor, with the numbers that were written."""
    letters, digits = re.sub(r"[^a-z]", "", factor.partition("(")[0]), re.sub(r"\D", "", factor.partition("(")[0]) or "2"
    close = difflib.get_close_matches(letters, FACTORS, n=3, cutoff=0.5)
    close.sort(key=lambda name: name[0] != letters[0])  # of equally near ones that with the same first letter
    if close:
        return f'; did you mean "{close[0]}{digits}"?'
    return f"; factors, joined by x: {', '.join(item.form.split(',')[0] for item in FACTORS.values())}"


def _options(text: str, layout: str) -> tuple[str, ...]:
    """Return the settings of what follows the colon, joined by `+`."""
    found: list[str] = []
    for word in text.split("+"):
        numbered = re.fullmatch(r"([a-z]+)([1-9]\d*)", word)
        if word in OPTIONS:
            found += OPTIONS[word]
        elif numbered and numbered[1] in NUMBERED_OPTIONS:
            found += [setting.format(numbered[2]) for setting in NUMBERED_OPTIONS[numbered[1]]]
        elif re.fullmatch(r"[A-Za-z_][\w.]*=.*", word):
            found.append(word)
        else:
            known = [*OPTIONS, *(f"{name}{numbered[2] if numbered else 2}" for name in NUMBERED_OPTIONS)]
            raise LayoutError(f'layout "{layout}": no option is called "{word}"{nearest(word, known)}; key=value works too')
    return tuple(found)


def describe_layouts() -> dict[str, list[tuple[str, str]]]:
    """Return the grammar and the limits as titled rows of two columns, for `dufu show layouts`."""
    numbered = [(f"{name}N", " ".join(setting.format("N") for setting in settings)) for name, settings in NUMBERED_OPTIONS.items()]
    return {
        "factors, joined by x, in any order (dp2xtp2, zero3xpp2(zbv))": [(f.form, f.meaning) for f in FACTORS.values()],
        "options, after a colon, joined by + (tp2xpp2:recompute+O1)": [
            *((name, " ".join(settings)) for name, settings in OPTIONS.items()),
            *numbered,
            ("key=value", "any setting"),
        ],
        "what cannot be combined": [
            (limit.what, f"{limit.reason} (refused: {limit.example} of {limit.recipe})") for limit in LIMITS
        ],
    }


__all__ = ["FACTORS", "LIMITS", "OPTIONS", "LayoutText", "describe_layouts", "parse_layout", "parse_layouts"]
