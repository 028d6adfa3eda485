"""dufu's side: the training step of `dufu train`, on random tokens, batches made each step as in a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dufu.layers.dropout import Dropout
from dufu.parallel.layout import layout_from_config
from dufu.parallel.process import choose_device, join, settle_allocator, world_size
from dufu.training.batches import to_batch
from dufu.training.effective import effective_config
from dufu.training.precision import precision_from_config
from dufu.training.run import build_model, build_optimizer, build_schedule
from dufu.training.step import TrainStep


def build(
    shape: dict[str, Any],
    batch: int,
    bf16: bool,
    overrides: tuple[str, ...] = (),
    plain_dropout: bool = False,
    micro_batches: int = 1,
) -> Callable[[], None]:
    """Return one training step.

    Args:
        shape: sizes with the names of PlainGPT.
        batch: samples of a micro-batch on each data-parallel process.
        bf16: autocast (O1).
        overrides: layout and other settings.
        plain_dropout: put PyTorch's dropout in the place of the counter-based one, to see what that costs.
        micro_batches: of one step.
    """
    p = shape["dropout"]
    sizes = {
        "vocab_size": shape["vocab"], "hidden_layers": shape["layers"], "hidden_size": shape["width"], "ffn_hidden_size": 4 * shape["width"],
        "num_attention_heads": shape["heads"], "max_seq_length": shape["length"], "embedding_dropout_prob": p,
        "attention_dropout_prob": p, "output_dropout_prob": p,
    }  # fmt: skip
    settings = [f"model.cfg.{k}={v}" for k, v in sizes.items()]
    config = effective_config("gpt2_tiny", [*settings, "optim.lr=1e-4", f"train.amp.enabled={str(bf16).lower()}", *overrides])
    processes = join(layout_from_config(config.train, world_size()), choose_device("cpu"))
    settle_allocator()
    precision = precision_from_config(config.train.amp, processes.device)
    distributed = build_model(config, processes, precision)
    optimizer, clip, norm_type = build_optimizer(config, distributed)
    train_step = TrainStep(distributed, optimizer, build_schedule(config, optimizer), precision, None, clip, norm_type)
    ids = np.random.default_rng(processes.data.rank).integers(0, shape["vocab"], (batch, shape["length"] + 1))
    samples = [{"input_ids": row[:-1].copy(), "labels": row[1:].copy()} for row in ids]
    if plain_dropout:
        _use_plain_dropout(distributed.model)
    count = 0

    def step() -> None:
        nonlocal count
        numbers = np.arange(batch, dtype=np.int64) + batch * micro_batches * count
        micro = [to_batch(samples, numbers + batch * m, 1, count, processes.device) for m in range(micro_batches)]
        train_step(count, micro)
        train_step.totals.sums.clear()
        count += 1

    return step


def _use_plain_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Dropout):
            module.forward = lambda x, keys=None, m=module: torch.nn.functional.dropout(x, m.p, m.training)  # type: ignore[method-assign]
            module.attention = lambda probs, keys, first, m=module: torch.nn.functional.dropout(probs, m.p, m.training)  # type: ignore[method-assign]
