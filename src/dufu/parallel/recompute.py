"""Recomputation: a layer keeps its input instead of its activations, and runs forward again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def prepare_units(units: dict[str, nn.Module], recompute: str | None, compiled: bool) -> None:
    """Make units recompute their activations, compiled or not.

    Compiled code is recomputed as a whole. What to keep of it selectively is the compiler's business, so there it comes last.
    """

    def compile_them() -> None:
        for unit in units.values():
            unit.forward = torch.compile(unit.forward)  # type: ignore[method-assign]

    if compiled and recompute != "selective":
        compile_them()
    if recompute is not None:
        recompute_units(units, recompute)
    if compiled and recompute == "selective":
        compile_them()


def recompute_units(units: dict[str, nn.Module], mode: str) -> list[str]:
    """Make units recompute their activations in backward; return their names.

    Args:
        units: those of the chain between the first and the last.
        mode: "full" keeps only the unit's input; "selective" also the results of matrix products and attention.

    dufu's own dropout masks are a function of the tokens' keys, which are the unit's input; PyTorch's generator is restored too.
    """
    contexts: dict[str, Any] = {}
    if mode == "selective":
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    names = list(units)
    for name in names:
        unit = units[name]
        unit.forward = _recomputed(unit.forward, contexts)  # type: ignore[method-assign]
    return names


def _recomputed(forward: Callable[..., Any], contexts: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return run
