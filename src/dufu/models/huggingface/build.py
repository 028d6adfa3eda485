"""A transformers model from a folder's config.json, its matrices on the meta device, and how each of its weights begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dufu.errors import CheckpointError, ConfigError
from dufu.layers.initial import Constant, Given, Initial, Normal
from dufu.models.hf import read_config


class _MatricesOnMeta(TorchFunctionMode):
    """Let what is made empty, as PyTorch's layers make their weights, lie on the meta device; the rest is computed as usual."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def transformers_library() -> Any:
    """Return the transformers package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError('model=huggingface needs transformers; install it with pip install "dufu[hf]"') from None
    return transformers


def build_network(folder: Path, architecture: str | None, changes: Mapping[str, Any]) -> nn.Module:
    """Return a transformers model without weights; its buffers and small parameters have values.

    Code that a folder brings along is never run.

    Args:
        folder: holds config.json.
        architecture: transformers' class; None = the one that config.json names.
        changes: fields that replace those of config.json.

    Raises:
        CheckpointError: no config.json, or none that transformers knows. ConfigError: no such class or field.
    """
    transformers = transformers_library()
    values = read_config(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{folder / 'config.json'}: transformers does not take it ({first})") from None
    for name, value in changes.items():
        if not hasattr(config, name):
            raise ConfigError(f"model.cfg.config.{name}: {type(config).__name__} has no such field")
        setattr(config, name, value)
    kind = architecture or next(iter(values.get("architectures") or ()), None)
    if kind is None:
        raise CheckpointError(
            f"{folder / 'config.json'}: names no architecture; set model.cfg.architecture, such as BertForMaskedLM"
        )
    cls: Any = getattr(transformers, str(kind), None)
    is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    if not is_model:
        raise ConfigError(f"transformers has no model class {kind}; code from a folder is not run")
    if not isinstance(config, cls.config_class):
        raise ConfigError(f"{kind} takes a {cls.config_class.__name__}, but {folder / 'config.json'} is a {type(config).__name__}")
    with torch.device("cpu"), _MatricesOnMeta():
        network: nn.Module = cls(config)
    describe_beginning(network, float(getattr(config.get_text_config(), "initializer_range", 0.02)))
    return network


def describe_beginning(network: nn.Module, spread: float) -> None:
    """Say how each parameter begins where no file holds it, and put all of them on the meta device; shared ones stay shared.

    Args:
        spread: standard deviation of matrices.
    """
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in network.modules():
        rules: dict[str, Initial] = {}
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            if not parameter.is_meta:
                rules[leaf] = Given(parameter.detach())
            elif parameter.dim() > 1:
                rules[leaf] = Normal(spread)
            else:
                rules[leaf] = Constant(1.0 if leaf == "weight" else 0.0)
            if parameter not in moved:
                moved[parameter] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            module._parameters[leaf] = moved[parameter]
        if rules:
            module.initial = rules  # type: ignore[assignment]


__all__ = ["build_network", "describe_beginning", "transformers_library"]
