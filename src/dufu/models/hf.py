"""Hugging Face's config.json: which of our models it describes, and the other way round.

Each family's `hf.py` offers a `FAMILY`. A field that changes numbers is taken, or must have the one value that we compute; a field that
nobody here knows is refused by name, since it might.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from dufu.errors import CheckpointError, ConfigError, nearest
from dufu.models.names import Table

# model_type → the module that knows it
HOMES = {
    "vit": "dufu.models.vit.hf",
    "clip": "dufu.models.clip.hf",
    "swin": "dufu.models.swin.hf",
    "swinv2": "dufu.models.swin.hf",
    "gpt2": "dufu.models.gpt2.hf",
    "bert": "dufu.models.bert.hf",
    "megatron-bert": "dufu.models.bert.megatron",
    "roberta": "dufu.models.roberta.hf",
    "xlm-roberta": "dufu.models.roberta.hf",
    "albert": "dufu.models.albert.hf",
    "llama": "dufu.models.llama.hf",
    "qwen2": "dufu.models.qwen.hf",
    "qwen3": "dufu.models.qwen.hf",
    "qwen2_moe": "dufu.models.qwen.hf",
    "qwen3_moe": "dufu.models.qwen.hf",
    "mistral": "dufu.models.mistral.hf",
    "mixtral": "dufu.models.mixtral.hf",
    "gemma": "dufu.models.gemma.hf",
    "opt": "dufu.models.opt.hf",
    "bloom": "dufu.models.bloom.hf",
    "glm": "dufu.models.glm.hf",
    "glm4": "dufu.models.glm.hf",
    "chatglm": "dufu.models.chatglm.hf",
    "t5": "dufu.models.t5.hf",
    "mt5": "dufu.models.t5.hf",
    "bart": "dufu.models.bart.hf",
    "mbart": "dufu.models.bart.hf",
}

# Fields that every config.json may have and that change no number of the network itself.
NEUTRAL = frozenset(
    """_name_or_path _commit_hash architectures model_type transformers_version torch_dtype dtype use_cache name_or_path
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id task_specific_params finetuning_task id2label label2id num_labels problem_type
    return_dict output_hidden_states output_attentions torchscript gradient_checkpointing tokenizer_class prefix
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    output_scores return_dict_in_generate remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens auto_map attn_implementation _attn_implementation _attn_implementation_autoset is_encoder_decoder
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    n_ctx""".split()  # noqa: SIM905 - a list of words
)

ACTIVATIONS = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu", "gelu_python": "gelu",
    "relu": "relu", "silu": "silu", "swish": "silu", "quick_gelu": "quick_gelu", "relu2": "squared_relu", "tanh": "tanh",
}  # fmt: skip
# What we write; of two names that mean the same, the one that most readers know.
_ACTIVATION_NAMES = {
    "gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu", "quick_gelu": "quick_gelu", "squared_relu": "relu2",
    "tanh": "tanh",
}  # fmt: skip


class Fields:
    """The fields of a config.json, each to be taken, expected or known to be neutral; `done` refuses what is left.

    Args:
        values: the file's content.
        where: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values, self.where = dict(values), where
        self._seen: set[str] = set(NEUTRAL)
        self.asked = False  # whether the class that the file names decided something

    def take(self, name: str, default: Any = ..., *others: str) -> Any:
        """Return a field's value.

        Args:
            default: what a file means that does not say; `...` = it must say.
            others: older names of the field.

        Raises:
            CheckpointError: it is missing.
        """
        self._seen.update((name, *others))
        for key in (name, *others):
            if self.values.get(key) is not None:
                return self.values[key]
        if default is ...:
            raise CheckpointError(f"{self.where}: has no {name}")
        return default

    def whole(self, name: str, default: Any = ..., *others: str) -> int:
        """Return a field that is a whole number of at least 1, such as a size."""
        value = self.take(name, default, *others)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.where}: {name}={value!r}: a whole number of at least 1")
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse a field that has another value than these; a file need not have it."""
        self._seen.add(name)
        if name in self.values and self.values[name] not in allowed:
            raise CheckpointError(
                f"{self.where}: {name}={self.values[name]!r} changes the numbers and is not built; "
                f"dufu computes {' or '.join(repr(a) for a in allowed)}"
            )

    def ignore(self, *names: str) -> None:
        """Know fields that change no number here."""
        self._seen.update(names)

    def activation(self, name: str, default: str = ...) -> str:  # type: ignore[assignment]
        """Return our name of an activation."""
        value = self.take(name, default)
        if value not in ACTIVATIONS:
            raise CheckpointError(f"{self.where}: {name}={value!r}: {', '.join(sorted(ACTIVATIONS))} are built")
        return ACTIVATIONS[value]

    @property
    def architecture(self) -> str:
        """Return the class that the file names, such as BertForMaskedLM; "" where it names none."""
        self.asked = True
        found = self.values.get("architectures") or [""]
        return str(found[0])

    def done(self) -> None:
        """Refuse fields that nobody asked for.

        Raises:
            CheckpointError: there are some; they are listed.
        """
        left = {k: v for k, v in self.values.items() if k not in self._seen and v is not None and not k.startswith("_")}
        if left:
            shown = ", ".join(f"{k}={v!r}" for k, v in sorted(left.items())[:8])
            raise CheckpointError(
                f"{self.where}: dufu does not know {shown}, which might change the numbers; take out of config.json what does not"
            )


def activation_name(ours: str | None) -> str:
    """Return Hugging Face's name of an activation.

    Raises:
        ConfigError: there is none.
    """
    if ours not in _ACTIVATION_NAMES:
        raise ConfigError(f"activation {ours!r} has no name in Hugging Face's configs")
    return _ACTIVATION_NAMES[ours]


def refuse_unless(cfg: Mapping[str, Any], kind: str, **needed: Any) -> None:
    """Raise ConfigError where a model has a setting that Hugging Face's `kind` cannot express."""
    for name, value in needed.items():
        if cfg[name] != value:
            raise ConfigError(f"model.cfg.{name}={cfg[name]!r}: Hugging Face's {kind} has no such setting; it computes {value!r}")


@dataclass(frozen=True)
class Family:
    """How one of our model families and Hugging Face's describe each other.

    Args:
        targets: dotted paths of our classes.
        read: from the fields of a config.json, our class's dotted path and its arguments. It need not call `done`.
        write: from our class's dotted path and its complete arguments, the fields of a config.json, `model_type` and `architectures`
            included.
        table: from the same two, the names of the weights.
        describes: whether a config.json's model_type says which of the classes it is of.
    """

    targets: tuple[str, ...]
    read: Callable[[Fields], tuple[str, dict[str, Any]]]
    write: Callable[[str, Mapping[str, Any]], dict[str, Any]]
    table: Callable[[str, Mapping[str, Any]], Table]
    describes: bool = True


@dataclass
class Described:
    """A model that a config.json describes: our class's dotted path, its arguments, and the fields of the file."""

    target: str
    cfg: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)


def _family(module: str) -> Family:
    found: Family = import_module(module).FAMILY
    return found


def canonical(cls: Any) -> str:
    """Return the dotted path under which a family knows one of its classes: its package and its name."""
    module: str = cls.__module__
    package = module if hasattr(sys.modules[module], "__path__") else module.rpartition(".")[0]
    return f"{package}.{cls.__name__}"


def family_of(target: str) -> Family:
    """Return the family that one of our classes belongs to: that of the `hf` module in its package.

    Raises:
        ConfigError: it has no Hugging Face counterpart.
    """
    package = target.rpartition(".")[0]
    try:
        family = _family(f"{package}.hf")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.hf":
            raise
        raise ConfigError(f"{target} has no counterpart in Hugging Face's formats") from None
    if target not in family.targets:
        raise ConfigError(f"{target} has no counterpart in Hugging Face's formats; {', '.join(family.targets)} have")
    return family


def complete(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's arguments with the defaults of those that are not given."""
    module, name = target.rsplit(".", 1)
    signature = inspect.signature(getattr(import_module(module), name).__init__)
    defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not inspect.Parameter.empty}
    return {**defaults, **cfg}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; {folder} is no Hugging Face folder") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return values


def _refuse_other_class(fields: Fields, ours: list[str]) -> None:
    """Raise CheckpointError where a file names another class than the one that the family has; its bare model is the same network."""
    named = fields.architecture
    if named and named not in ours and not named.endswith("Model"):
        raise CheckpointError(f"{fields.where}: architectures={named} is not built; {' and '.join(ours)} is")


def describe_folder(folder: Path, architecture: str = "") -> Described:
    """Return our model of a Hugging Face folder.

    Args:
        architecture: the class that it is to be read as, such as BertForSequenceClassification; "" = its own.

    Raises:
        CheckpointError: an unknown model_type, or a field that is missing, not built or unknown.
    """
    values = read_config(folder)
    kind = values.get("model_type")
    if kind not in HOMES:
        raise CheckpointError(
            f"{folder / 'config.json'}: model_type={kind!r} is no family of dufu's{nearest(str(kind), list(HOMES))}; "
            f"model=huggingface runs transformers' own class"
        )
    if architecture:
        values["architectures"] = [architecture]
    fields = Fields(values, str(folder / "config.json"))
    family = _family(HOMES[kind])
    target, cfg = family.read(fields)
    fields.done()
    if not fields.asked:
        _refuse_other_class(fields, family.write(target, complete(target, cfg))["architectures"])
    return Described(target, cfg, values)
