"""How transformers' models are divided by tensor: their own plan where they have one, else a table of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from dufu.errors import LayoutError
from dufu.models.huggingface import seams

Plan = Mapping[str, str]  # a name, `*` being a number → how the module of that name is divided

_BERT = {
    "encoder.layer.*.attention.self.query": "colwise",
    "encoder.layer.*.attention.self.key": "colwise",
    "encoder.layer.*.attention.self.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.crossattention.self.query": "colwise",
    "encoder.layer.*.crossattention.self.key": "colwise",
    "encoder.layer.*.crossattention.self.value": "colwise",
    "encoder.layer.*.crossattention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}
OWN: Mapping[str, Plan] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "gpt2": {
        "h.*.attn.c_attn": "colwise_qkv",
        "h.*.attn.c_proj": "rowwise",
        "h.*.attn": "count num_heads split_size",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "opt": {
        "decoder.layers.*.self_attn.q_proj": "colwise",
        "decoder.layers.*.self_attn.k_proj": "colwise",
        "decoder.layers.*.self_attn.v_proj": "colwise",
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.self_attn": "count num_heads",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    },
    "t5": {
        **{f"block.*.layer.*.{kind}.{leaf}": "colwise" for kind in ("SelfAttention", "EncDecAttention") for leaf in "qkv"},
        **{f"block.*.layer.*.{kind}.o": "rowwise" for kind in ("SelfAttention", "EncDecAttention")},
        **{f"block.*.layer.*.{kind}": "count n_heads" for kind in ("SelfAttention", "EncDecAttention")},
        "block.*.layer.*.SelfAttention.relative_attention_bias": "colwise",
        "block.*.layer.*.DenseReluDense.wi": "colwise",
        "block.*.layer.*.DenseReluDense.wi_0": "colwise",
        "block.*.layer.*.DenseReluDense.wi_1": "colwise",
        "block.*.layer.*.DenseReluDense.dropout": "divided features",
        "block.*.layer.*.DenseReluDense.wo": "rowwise",
    },
    "vit": {
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    },
}
_WHOLE = ("embedding_rowwise", "vocab_parallel")  # tables that dufu leaves whole


def _share(module: nn.Module) -> bool:
    seams.sum_gradients(module)
    return True


_WAYS: Mapping[str, Callable[[nn.Module], bool]] = {
    "colwise": seams.split_columns,
    "colwise_qkv": lambda module: seams.split_columns(module, sections=3),
    "rowwise": seams.split_rows,
    "colwise_gather_output": lambda module: seams.split_columns(module, gathered=True),
    "rowwise_split_input": lambda module: seams.split_rows(module, whole_input=True),
    "replicated_with_grad_allreduce": _share,
    "divided features": seams.divide_features,
}


def plan_of(network: Any) -> dict[str, str]:
    """Return a model's plan: that of transformers, or ours; empty where there is none. What stays whole is left out.

    The word table and the head stay whole on every process.
    """
    theirs = dict(getattr(network, "_tp_plan", None) or {})
    head = {name for name, _ in network.named_modules() if name.split(".")[-1] == "lm_head"}
    chosen = {name: how for name, how in theirs.items() if name not in head and how not in _WHOLE}
    return chosen or dict(OWN.get(network.config.model_type, {}))


def install_plan(network: nn.Module) -> None:
    """Give the modules that a plan names their seams, in place. What stands in the way is said only when the model is to be divided.

    The network gets a method `check_split`, as dufu's layers have one.
    """
    plan = plan_of(network)
    problems: list[str] = []
    if not plan:
        problems.append(f"neither transformers nor dufu has a tensor-parallel plan for {network.config.model_type}")  # type: ignore[union-attr]
    found: list[tuple[str, nn.Module, str]] = list(_matches(network, plan))
    for name, module, how in found:
        if how.startswith("count "):
            seams.divide_numbers(module, tuple(how.split()[1:]))
        elif how not in _WAYS or not _WAYS[how](module):
            problems.append(f"transformers' plan divides {name} ({type(module).__name__}) by '{how}', which dufu does not")
    if plan and not found:
        problems.append("none of the modules that its tensor-parallel plan names is there")

    def check_split(parts: int) -> None:
        if problems:
            more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise LayoutError(f"{type(network).__name__} cannot be divided over tensor_parallel_size={parts}: {problems[0]}{more}")
        check_heads(network.config, parts)

    network.check_split = check_split  # type: ignore[assignment]


def _matches(network: nn.Module, plan: Plan) -> Iterator[tuple[str, nn.Module, str]]:
    patterns = [
        (re.compile(r"(?:.*\.)?" + r"\d+".join(re.escape(part) for part in name.split("*"))), how) for name, how in plan.items()
    ]
    for name, module in list(network.named_modules()):
        for pattern, how in patterns:
            if pattern.fullmatch(name):
                yield name, module, how
                break


def check_heads(config: Any, parts: int) -> None:
    """Raise LayoutError when the heads do not divide over `parts` processes."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    for what, count in (("attention heads", heads), ("key-value heads", groups)):
        if count % parts:
            fits = [n for n in range(1, parts) if heads % n == 0 and groups % n == 0]
            raise LayoutError(
                f"{count} {what} do not divide over tensor_parallel_size={parts}; the nearest size that fits is {fits[-1]}"
            )


__all__ = ["OWN", "check_heads", "install_plan", "plan_of"]
