"""Parameter groups: which parameters share weight decay, learning rate and so on."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from dufu.errors import ConfigError, nearest

NORMS: tuple[type[nn.Module], ...] = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


def is_norm(module: nn.Module) -> bool:
    """Say whether a module is a normalisation layer: one of PyTorch's, or one that declares `is_norm`."""
    return isinstance(module, NORMS) or bool(getattr(module, "is_norm", False))


def clip_setting(max_norm: float | None, alias: float | None) -> float | None:
    """Return the clip norm that two names give; both given and different is an error."""
    if alias is not None and max_norm is not None and alias != max_norm:
        raise ConfigError(f"optim.params.clip_grad_norm={alias} but clip_grad_max_norm={max_norm}; give one of them")
    return alias if alias is not None else max_norm


def get_default_optimizer_params(
    model: nn.Module,
    base_lr: float | None = None,
    weight_decay: float | None = None,
    weight_decay_norm: float | None = None,
    weight_decay_bias: float | None = None,
    clip_grad_max_norm: float | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_norm_type: float = 2.0,
    overrides: dict[str, dict[str, Any]] | None = None,
    pattern_overrides: dict[str, dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return optimizer groups, one for each distinct setting, in order of first appearance.

    Where several rules meet a parameter, the later wins setting by setting: general, norm, bias and `overrides`, `pattern_overrides`.

    Args:
        model: frozen parameters are left out, shared ones counted once, under their first name.
        base_lr: learning rate of all; None leaves the optimizer's.
        weight_decay: of all; None leaves the optimizer's.
        weight_decay_norm: of the parameters of normalisation layers; None treats them as all others.
        weight_decay_bias: of parameters called "bias", those of normalisation layers too; None treats them as all others.
        clip_grad_max_norm, clip_grad_norm: largest global gradient norm, two names for one thing; default 1.0, 0 = no clipping.
        clip_grad_norm_type: p of the norm.
        overrides: settings by the last part of a parameter's name, such as {"pos_embed": {"weight_decay": 0.0}}.
        pattern_overrides: settings by a pattern of the whole name, such as {"layers.0.*": {"lr": 1e-5}}.

    Raises:
        ConfigError: both clip names disagree, bias is set both ways, or an override meets no parameter.
    """
    limit = clip_setting(clip_grad_max_norm, clip_grad_norm)
    defaults: dict[str, Any] = {"clip_grad_max_norm": 1.0 if limit is None else limit, "clip_grad_norm_type": clip_grad_norm_type}
    if base_lr is not None:
        defaults["lr"] = base_lr
    if weight_decay is not None:
        defaults["weight_decay"] = weight_decay
    leaves, patterns = dict(overrides or {}), dict(pattern_overrides or {})
    unmet = {"overrides": set(leaves), "pattern_overrides": set(patterns)}
    if weight_decay_bias is not None:
        if "bias" in leaves:
            raise ConfigError('optim.params: "bias" is set by weight_decay_bias and by overrides; give one of them')
        leaves["bias"] = {"weight_decay": weight_decay_bias}
    groups: dict[str, dict[str, Any]] = {}
    seen: set[nn.Parameter] = set()
    names: list[str] = []
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            name = f"{prefix}.{leaf}" if prefix else leaf
            names.append(name)
            settings = dict(defaults)
            if is_norm(module) and weight_decay_norm is not None:
                settings["weight_decay"] = weight_decay_norm
            if leaf in leaves:
                settings.update(leaves[leaf])
                unmet["overrides"].discard(leaf)
            for pattern in patterns:
                if fnmatchcase(name, pattern):
                    settings.update(patterns[pattern])
                    unmet["pattern_overrides"].discard(pattern)
            groups.setdefault(repr(sorted(settings.items())), {"params": [], **settings})["params"].append(parameter)
    for rule, missing in unmet.items():
        for key in sorted(missing):
            known = names if rule == "pattern_overrides" else [name.rsplit(".", 1)[-1] for name in names]
            raise ConfigError(f'optim.params.{rule}: "{key}" meets no trained parameter{nearest(key, known)}')
    return list(groups.values())
