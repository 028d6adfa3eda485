"""Names of an unmodified transformers model's weights: as they are, with what transformers itself renames, ties or ignores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dufu.errors import ConfigError, NotBuiltError
from dufu.models.hf import Family, Fields, read_config
from dufu.models.huggingface.build import build_network
from dufu.models.names import Table, same

TARGET = "dufu.models.huggingface.HuggingFace"


def _read(fields: Fields) -> tuple[str, dict[str, Any]]:
    raise ConfigError(f'{fields.where}: model=huggingface takes the folder: LazyCall("dufu.models.HuggingFace")(folder=FOLDER)')


def _network(cfg: Mapping[str, Any]) -> Any:
    return build_network(Path(cfg["folder"]), cfg["architecture"], cfg["config"] or {})


def _write(target: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
    fields = {**read_config(Path(cfg["folder"])), **(cfg["config"] or {})}
    return {**fields, "architectures": [type(_network(cfg)).__name__]}


def table_of(network: Any) -> Table:
    """Return the table of a transformers model's weights.

    Raises:
        NotBuiltError: values that are no parameters, or weights that transformers puts together from several of a file.
    """
    names = [name for name, _ in network.named_parameters()]
    buffers = [name for name in network.state_dict() if name in dict(network.named_buffers())]
    if buffers:
        raise NotBuiltError(f"{type(network).__name__}: {buffers[0]} is saved with its weights but is no parameter")
    first: dict[nn.Parameter, str] = {}
    copies: dict[str, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            copies[name] = first[parameter]
    prefix = f"{network.base_model_prefix}." if network.base_model_prefix else ""
    # What transformers ignores it ignores only where the model has no such weight.
    known = {re.sub(r"\d+", r"\\d+", re.escape(name)) for full in (*names, *copies) for name in (full, full.removeprefix(prefix))}
    ignored = getattr(network, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [f"(?!(?:{'|'.join(sorted(known))})$).*(?:{pattern}).*" for pattern in ignored]
    rules = tuple(same(name, name) for name in names)
    return Table(rules, tuple(patterns), copies, prefix, _renamings(network, names))


def _renamings(network: Any, names: list[str]) -> tuple[tuple[str, str], ...]:
    """Return what transformers renames in a file; a conversion that does more is refused where it concerns this model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    found: list[tuple[str, str]] = []
    for change in get_model_conversion_mapping(network):
        targets = [pattern.strip("^$").replace("\\", "") for pattern in change.target_patterns]
        if not any(target in name for name in names for target in targets):
            continue
        if type(change) is not WeightRenaming:
            raise NotBuiltError(
                f"{type(network).__name__}: a file holds {', '.join(targets)} in another form, which transformers puts together when it "
                f"reads; dufu's own family of this model reads it"
            )
        found += [(source, change.target_patterns[0]) for source in change.source_patterns]
    return tuple(found)


def _table(target: str, cfg: Mapping[str, Any]) -> Table:
    return table_of(_network(cfg))


FAMILY = Family(targets=(TARGET,), read=_read, write=_write, table=_table, describes=False)
