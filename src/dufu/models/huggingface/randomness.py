"""Dropout of transformers' models by dufu's counter-based masks: its modules, and the attention that transformers calls by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dufu.errors import ConfigError, DufuError
from dufu.layers.dropout import Dropout, masked
from dufu.layers.random import counters, derive, keep_mask, keep_scale
from dufu.layers.split import WHOLE, Split

ATTENTION = "dufu"  # the name under which transformers calls our attention
_AS_CALLED = -1.0  # the probability comes with each call; where it was set to 0, dropout was switched off
SEAM = "dufu_seam"  # the child of an attention module that knows its part of the heads


@dataclass
class Keys:
    """The dropout keys of the batch that runs.

    Args:
        now: (B, T); None = PyTorch's generator decides.
        make: gives those of another length T, where a model has sequences of several lengths.
    """

    now: Tensor | None = None
    make: Callable[[int], Tensor] | None = None

    def of(self, samples: int, length: int) -> Tensor | None:
        """Return the keys (samples, length), or None where there are none of this shape."""
        if self.now is None or self.now.shape[0] != samples:
            return None
        if self.now.shape[1] != length:
            return None if self.make is None else self.make(length)
        return self.now


class KeyedDropout(Dropout):
    """nn.Dropout of a foreign model: the mask comes from the keys of the batch that runs.

    Args:
        p: probability.
        keys: those of the model.
        name: of the module, for messages.

    Shapes: features of tokens (B, T, F) or (B · T, F), of samples (B, F), or attention probabilities (B, H, T, S).
    """

    def __init__(self, p: float, keys: Keys, name: str) -> None:
        super().__init__(p)
        self.keys, self.name = keys, name
        self.split: Split = WHOLE
        self.divided = False  # whether the features are divided over tensor-parallel processes

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Drop features of x; see the class."""
        now = self.keys.now if keys is None else keys
        if not self.training or self.p == 0.0 or now is None:
            return super().forward(x)
        if x.dim() == 4 and (probabilities := self.keys.of(x.shape[0], x.shape[2])) is not None:
            return self.attention(x, probabilities, self.split.rank * x.shape[1])
        if x.dim() == 3 and (tokens := self.keys.of(x.shape[0], x.shape[1])) is not None:
            chosen = tokens
        elif x.dim() == 2 and x.shape[0] == now.shape[0]:
            chosen = now[:, 0]
        elif x.dim() == 2 and x.shape[0] == now.numel():
            chosen = now.flatten()
        else:
            raise DufuError(
                f"{self.name}: dropout on a tensor {list(x.shape)} of {list(now.shape)} tokens, whose mask would depend on the layout; "
                f"set this probability to 0 in the model's config"
            )
        first = self.split.rank * x.shape[-1] if self.divided else 0
        mask = keep_mask(derive(chosen, self.place.to(chosen.device)), x.shape[-1], self.p, first)
        return masked(x, mask, keep_scale(self.p))


class AttentionSeam(nn.Module):
    """What our attention knows of the module that calls it: its place among the model's, and its part of the heads."""

    def __init__(self, keys: Keys, name: str) -> None:
        super().__init__()
        self.split: Split = WHOLE
        self.dropout = KeyedDropout(0.0, keys, name)
        self.dropout.p = _AS_CALLED

    def drop(self, probs: Tensor, p: float) -> Tensor:
        """Drop attention probabilities (B, H, T, S) of this process's heads."""
        keys = self.dropout.keys.of(probs.shape[0], probs.shape[2])
        if keys is None:
            raise DufuError(
                f"{self.dropout.name}: dropout on attention {list(probs.shape)}, whose mask would depend on the layout; set it to 0"
            )
        heads = counters(self.split.rank * probs.shape[1] + 1, probs.shape[1], keys.device).view(1, -1, 1)
        streams = derive(derive(keys, self.dropout.place.to(keys.device)).unsqueeze(1), heads)
        return masked(probs, keep_mask(streams, probs.shape[-1], p), keep_scale(p))


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend, as transformers' attention functions do: PyTorch's fused kernel, or the explicit product where something is dropped.

    Args:
        query: (B, H, T, D); key, value: (B, H or fewer, S, D).
        attention_mask: bool, true where attention is allowed, or numbers to be added; None = all keys, or the earlier ones.
        dropout: probability on the attention.
        scaling: factor on the scores; None = 1/√D.
        others: what transformers hands on, such as position_bias and softcap.

    Returns:
        (B, T, H, D).
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seam: AttentionSeam | None = getattr(module, SEAM, None)
    if seam is not None and (seam.dropout.p == 0.0 or not seam.dropout.training):
        dropout = 0.0
    keyed = seam is not None and seam.dropout.keys.now is not None
    softcap = others.get("softcap")
    if softcap is None and not (dropout > 0.0 and keyed):
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others)
        return out, None
    if others.get("s_aux") is not None:
        raise ConfigError(f"{type(module).__name__}: attention sinks with dropout are not built; set its attention dropout to 0")
    if key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query * scale, key.transpose(-1, -2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if others.get("position_bias") is not None:
        scores = scores + others["position_bias"]
    scores = _masked_scores(module, scores, attention_mask, others.get("is_causal"))
    probs = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    if dropout > 0.0 and seam is not None:
        probs = seam.drop(probs, dropout)
    return torch.matmul(probs, value).transpose(1, 2).contiguous(), None


def _masked_scores(module: nn.Module, scores: Tensor, mask: Tensor | None, causal: bool | None) -> Tensor:
    queries, keys = scores.shape[-2:]
    if mask is None:
        if not (getattr(module, "is_causal", True) if causal is None else causal) or queries == 1:
            return scores
        # transformers' own kernel aligns the first query with the first key
        mask = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril()
    if mask.dtype != torch.bool:
        return scores + mask
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


def register_attention() -> None:
    """Let transformers know our attention by its name; its masks are those of the fused kernel."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def install_dropout(network: nn.Module) -> Keys:
    """Let every dropout of a transformers model take its mask from keys, in place; return where they are put before a forward.

    Raises:
        ConfigError: a dropout above 0 that is no module and no part of attention; which, and how to switch it off.
    """
    keys = Keys()
    for name, module in list(network.named_modules()):
        _refuse_hidden_dropout(name, module)
        for leaf, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                dropout = KeyedDropout(child.p, keys, f"{name}.{leaf}" if name else leaf)
                dropout.train(child.training)
                setattr(module, leaf, dropout)
        if _attends(module) and SEAM not in module._modules:
            seam = AttentionSeam(keys, name)
            seam.train(module.training)
            module.add_module(SEAM, seam)
    if getattr(network, "_supports_attention_backend", False) or getattr(network, "_supports_sdpa", False):
        register_attention()
        network.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    return keys


def _attends(module: nn.Module) -> bool:
    """Say whether a module calls transformers' attention by its name."""
    return "is_causal" in vars(module) and "config" in vars(module)


def _refuse_hidden_dropout(name: str, module: nn.Module) -> None:
    layerdrop = getattr(module, "layerdrop", 0.0)
    if isinstance(layerdrop, float) and layerdrop > 0.0:
        raise ConfigError(
            f"{name}: layerdrop={layerdrop} leaves out layers by PyTorch's generator, which depends on the layout; "
            f"set layerdrop to 0 in the model's config"
        )
    if _attends(module) or not type(module).__module__.startswith("transformers."):
        return
    probability = next(
        ((k, v) for k, v in vars(module).items() if "drop" in k and isinstance(v, float) and v > 0.0), None
    )  # of a function, as a module has its own
    if probability is not None and "functional.dropout(" in _source(type(module)):
        raise ConfigError(
            f"{name}: {type(module).__name__} calls PyTorch's dropout as a function with {probability[0]}={probability[1]}, whose mask "
            f"depends on the layout; set {probability[0]} to 0 in the model's config"
        )


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


__all__ = ["ATTENTION", "AttentionSeam", "KeyedDropout", "Keys", "attention", "install_dropout", "register_attention"]
