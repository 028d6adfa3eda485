"""Which keys may stand at a place of a config, and of which type: from the schema, or from the signature of what is called there."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig

from dufu.config.lazy import clear_errors
from dufu.config.renamed import SYNONYMS, replacement
from dufu.config.resolve import resolve
from dufu.config.schema import CALLS, SECTION_NAMES, SECTIONS, section_at, section_paths
from dufu.config.signature import Signature, signature_of
from dufu.errors import ConfigError, nearest

RESERVED = ("_target_", "_recursive_")


class UnknownKey(ConfigError):
    """A key that nothing declares. Whoever holds the whole config says where it does belong.

    Args:
        name: the key.
        where: the dotted path of what it was found in; "" for the config itself.
        known: the keys that may stand there.
    """

    def __init__(self, name: str, where: str, known: Sequence[str]) -> None:
        self.name, self.where, self.known = name, where, list(known)
        super().__init__(self.text({}))

    def text(self, config: Any) -> str:
        """Return the message, with the place in `config` where a key of that name belongs, or the nearest one."""
        path = f"{self.where}.{self.name}" if self.where else self.name
        advice = replacement(path)
        if advice:
            return f"{path}: {advice}"
        start = f'{self.where} has no key "{self.name}"' if self.where else f'the config has no section "{self.name}"'
        return start + (_belongs(self.name, self.where, config) or self._close() or self._list())

    def _close(self) -> str:
        """Return the nearest key, of those that may stand here and of words that mean a key."""
        name = self.name.replace("-", "_").lower()
        words = {**{key.lower(): key for key in self.known}, **{k: v for k, v in SYNONYMS.items() if k not in self.known}}
        found = difflib.get_close_matches(name, words, n=1, cutoff=0.6)
        return f'; did you mean "{words[found[0]]}"?' if found else ""

    def _list(self) -> str:
        if 0 < len(self.known) <= 12:
            return f"; known: {', '.join(self.known)}"
        first = self.where.split(".")[0]
        return nearest(self.name, self.known) or (f"; `dufu show {first}` lists the keys" if first in SECTIONS else "")


def _belongs(name: str, where: str, config: Any) -> str:
    own = f"{where}.{name}" if where else name
    found = [path for path in [*section_paths(), *call_paths(config)] if path.rpartition(".")[2] == name and path != own]
    places = list(dict.fromkeys(path.rpartition(".")[0] for path in found))
    if not places or (not where and name in SECTION_NAMES):
        return ""
    return f'; "{name}" belongs to {" or ".join(places[:4])}'


def call_paths(config: Any) -> Iterator[str]:
    """Yield the dotted path of every argument that the recorded calls in a config accept."""
    yield from _call_paths(config, "")


def _call_paths(node: Any, where: str) -> Iterator[str]:
    if not isinstance(node, (Mapping, DictConfig)):
        return
    prefix = f"{where}." if where else ""
    try:
        if "_target_" in node:
            signature = signature_of(resolve(node["_target_"]))
            if signature.cfg and not signature.free_cfg:
                prefix += "cfg."
            yield from (prefix + name for name in signature.arguments)
        for key in node:
            yield from _call_paths(node[key], f"{where}.{key}" if where else str(key))
    except Exception:  # a config with another fault in it; this is only a hint
        return


@dataclass(frozen=True)
class Place:
    """What may stand below a dotted path.

    Args:
        keys: the allowed keys with their types; None where any key will do.
        annotation: the type of the place itself.
        kind: the registry's kind where a call stands; "" elsewhere.
    """

    keys: Mapping[str, Any] | None
    annotation: Any = Any
    kind: str = ""


def place_at(config: DictConfig, path: Sequence[str]) -> Place:
    """Return what may stand below `path` in a config."""
    node: Any = config
    place = Place({**{str(k): Any for k in config}, **dict.fromkeys(SECTION_NAMES, Any)})
    for depth, name in enumerate(path):
        place = _below(place, node, path[: depth + 1])
        node = _child(node, name)
    return place


def _child(node: Any, name: str) -> Any:
    with clear_errors():
        if isinstance(node, DictConfig):
            return node[name] if name in node else None
        if isinstance(node, ListConfig) and name.isdigit() and int(name) < len(node):
            return node[int(name)]
    return None


def _below(place: Place, parent: Any, path: Sequence[str]) -> Place:
    name, node = path[-1], _child(parent, path[-1])
    annotation = place.keys.get(name, Any) if place.keys is not None else Any
    kind = _kind(path)
    if isinstance(node, DictConfig) and "_target_" in node:
        return Place(_call_keys(signature_of(resolve(node["_target_"], ".".join(path)))), annotation, kind)
    if isinstance(node, str) and kind:
        return Place(_call_keys(signature_of(resolve(node, ".".join(path)))), annotation, kind)
    declared = section_at(".".join(path))
    if declared is not None and not declared[1]:
        return Place(get_type_hints(declared[0]), annotation, kind)
    if name == "cfg" and isinstance(parent, DictConfig) and "_target_" in parent:
        signature = signature_of(resolve(parent["_target_"]))
        free = signature.open or signature.free_cfg or not signature.cfg
        return Place(None if free else {a.name: a.accepted for a in signature.arguments.values()}, annotation)
    if _is_mapping(annotation) or place.keys is None:
        return Place(None, annotation)
    if annotation is not Any and not is_dataclass(annotation) and not isinstance(node, DictConfig):
        return Place({}, annotation, kind)
    free = annotation is not Any or (isinstance(parent, DictConfig) and "_target_" in parent)
    return Place(None if free or not isinstance(node, DictConfig) else {str(k): Any for k in node}, annotation, kind)


def _is_mapping(annotation: Any) -> bool:
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return any(option is dict or get_origin(option) in (dict, Mapping) for option in options)


def _kind(path: Sequence[str]) -> str:
    if len(path) == 1:
        return CALLS.get(path[0], "")
    declared = section_at(".".join(path))
    if declared is None or not declared[1]:
        return ""
    return str(declared[0].__dataclass_fields__[declared[1]].metadata.get("kind", ""))  # type: ignore[attr-defined]


def _call_keys(signature: Signature) -> dict[str, Any] | None:
    if signature.open:
        return None
    keys = {a.name: a.accepted for a in signature.arguments.values()}
    return {**keys, **({"cfg": Any} if signature.cfg else {}), **dict.fromkeys(RESERVED, Any)}
