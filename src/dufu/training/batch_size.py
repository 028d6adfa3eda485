"""The global batch, its micro-batches, and how they follow from each other (LiBai's rules)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dufu.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """Sizes in samples.

    Args:
        global_batch: of one step over all processes.
        micro: of one forward on one process.
        accumulation: forwards of one step on one process.
    """

    global_batch: int
    micro: int
    accumulation: int


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def plan_batch(train: Any, data_parallel: int) -> BatchPlan:
    """Derive what is not given. A global batch that does not divide gives unequal shares and never changes.

    Raises:
        ConfigError: a size below 1, or all are given and disagree.
    """
    micro, accumulation, whole = train.train_micro_batch_size, train.num_accumulation_steps, train.global_batch_size
    for name, value in (
        ("train_micro_batch_size", micro), ("num_accumulation_steps", accumulation), ("global_batch_size", whole)
    ):  # fmt: skip
        if value is not None and value < 1:
            raise ConfigError(f"train.{name}={value}: at least 1")
    if whole is None:
        micro = 32 if micro is None else micro
        accumulation = accumulation or 1
        return BatchPlan(micro * data_parallel * accumulation, micro, accumulation)
    share = _ceil(whole, data_parallel)
    if micro is None:
        if accumulation is not None and accumulation > share:
            raise ConfigError(
                f"train.num_accumulation_steps={accumulation}, but a process has only {share} of the {whole} samples of "
                f"train.global_batch_size; at most {share}"
            )
        micro = _ceil(share, accumulation or 1)
        if accumulation is not None and _ceil(share, micro) != accumulation:
            raise ConfigError(
                f"train.num_accumulation_steps={accumulation}: the {share} of {whole} samples that a process has make no {accumulation} "
                f"micro-batches of equal size but for the last; {_ceil(share, micro)} or {_ceil(share, micro - 1)} would do"
            )
    derived = _ceil(share, micro)
    if accumulation is not None:
        product = micro * data_parallel * accumulation
        if derived != accumulation or (whole % data_parallel == 0 and share % accumulation == 0 and product != whole):
            raise ConfigError(
                f"train.global_batch_size={whole}, but train_micro_batch_size {micro} × data parallel {data_parallel} × "
                f"num_accumulation_steps {accumulation} = {product}; leave one of them out"
            )
    return BatchPlan(whole, micro, derived)
