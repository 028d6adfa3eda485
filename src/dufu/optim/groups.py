"""Parameter groups: which parameters share weight decay, learning rate and so on."""

from __future__ import annotations

from typing import Any

from torch import nn

from dufu.errors import ConfigError

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
    overrides: dict[str, dict[str, float]] | None = None,
) -> list[dict[str, Any]]:
    """Return optimizer groups, one for each distinct setting, in order of first appearance.

    Args:
        model: frozen parameters are left out, shared ones counted once.
        base_lr: learning rate of all; None leaves the optimizer's.
        weight_decay: of all; None leaves the optimizer's.
        weight_decay_norm: of the parameters of normalisation layers; None treats them as all others.
        weight_decay_bias: of parameters called "bias" outside normalisation layers; None treats them as all others.
        clip_grad_max_norm, clip_grad_norm: largest global gradient norm, two names for one thing; default 1.0, 0 = no clipping.
        clip_grad_norm_type: p of the norm.
        overrides: settings by the last part of a parameter's name, such as {"pos_embed": {"weight_decay": 0.0}}.

    Raises:
        ConfigError: both clip names disagree, or bias is set both ways.
    """
    limit = clip_setting(clip_grad_max_norm, clip_grad_norm)
    defaults: dict[str, Any] = {
        "clip_grad_max_norm": 1.0 if limit is None else limit,
        "clip_grad_norm_type": clip_grad_norm_type,
    }
    if base_lr is not None:
        defaults["lr"] = base_lr
    if weight_decay is not None:
        defaults["weight_decay"] = weight_decay
    rules = dict(overrides or {})
    if weight_decay_bias is not None:
        if "bias" in rules:
            raise ConfigError('optim.params: "bias" is set by weight_decay_bias and by overrides; give one of them')
        rules["bias"] = {"weight_decay": weight_decay_bias}
    groups: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    seen: set[nn.Parameter] = set()
    used: set[str] = set()
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            settings = dict(defaults)
            if is_norm(module) and weight_decay_norm is not None:
                settings["weight_decay"] = weight_decay_norm
                if overrides and leaf in overrides:
                    settings.update(overrides[leaf])
                    used.add(leaf)
            elif leaf in rules:
                settings.update(rules[leaf])
                used.add(leaf)
            key = tuple(sorted(settings.items()))
            groups.setdefault(key, {"params": [], **settings})["params"].append(parameter)
    missing = [name for name in overrides or {} if name not in used]
    if missing:
        raise ConfigError(f"optim.params.overrides: no parameter is called {', '.join(missing)}")
    return list(groups.values())
