"""YAML that reads like the command line: only true/false are truth values, a number is a number however its exponent is written.

The core schema of YAML 1.2 but for two things: a number with leading zeros stays text until a declared type asks for a number, and
`<<` merges as in YAML 1.1. Nothing is ever constructed but mappings, lists, texts, numbers, truth values and null.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from dufu.config.lazy import as_config
from dufu.errors import ConfigError

_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the rules above, and no key twice."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - PyYAML's own way

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that stands twice; PyYAML takes the last one."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f'key "{key.value}" stands twice', key.start_mark)
                seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def _scalar_int(loader: yaml.SafeLoader, node: Any) -> int:
    return int(loader.construct_scalar(node))


def _scalar_float(loader: yaml.SafeLoader, node: Any) -> float:
    return float(str(loader.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _scalar_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _scalar_float)


def read_yaml(path: Path) -> Any:
    """Return a YAML file's config.

    Raises:
        ConfigError: not UTF-8, not YAML, a tag that would construct an object, a key given twice, or no mapping at the top.
    """
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{line}: not readable as YAML: {getattr(error, 'problem', None) or error}") from error
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}; a config is a mapping of sections")
    return as_config(value)
