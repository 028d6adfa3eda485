"""Recording the first steps of a config, on each process of a layout; nothing is written."""

from __future__ import annotations

from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from dufu.config.instantiate import instantiate
from dufu.config.trusted import trust
from dufu.data.feed import Feed, micro_batches, shares
from dufu.layers.dropout import Dropout, DropPath
from dufu.models.chain import Batch
from dufu.parallel.layout import ParallelLayout, layout_from_config
from dufu.parallel.process import Processes, choose_device, join, settle_allocator, world_size
from dufu.parallel.rehearsal import rehearse
from dufu.parity.made_up import UnequallyScored
from dufu.parity.recorder import NUMBERS, RecordedStep, Recorder
from dufu.parity.recording import RankRecord
from dufu.training.batch_size import BatchPlan, plan_batch
from dufu.training.batches import TrainingBatches
from dufu.training.data import build_dataset, complete_model_config, tokenizer_from_config
from dufu.training.optimizer import build_optimizer, build_schedule
from dufu.training.precision import LossScaler, precision_from_config
from dufu.training.run import build_model, call_config

_DROPOUTS = (Dropout, DropPath, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class ConfigJob:
    """What to record.

    Args:
        source: a recipe's name, a file or a run's folder.
        overrides: `key=value` settings, those of the layout last.
        data: files; made-up ones where `made_up`.
        steps: number of updates.
        trust: packages whose classes the config may name.
        dropout: whether dropout runs as configured; otherwise none is dropped.
        made_up: whether samples are to score unequal numbers of tokens.
    """

    source: str
    overrides: tuple[str, ...]
    data: tuple[str, ...]
    steps: int
    trust: tuple[str, ...] = ()
    dropout: bool = True
    made_up: bool = True

    def without_dropout(self) -> ConfigJob:
        """Return the same job with nothing dropped."""
        return replace(self, dropout=False)


class NumberedBatches(TrainingBatches):
    """Micro-batches that say which samples they hold."""

    def _read(self, step: int, consumed: int) -> list[Batch]:
        made = super()._read(step, consumed)
        parts = shares(self.feed.step_numbers(consumed), self.data_size)
        for batch, chosen in zip(made, micro_batches(parts[self.data_rank], len(parts[0]), self.plan.micro)):
            numbers = torch.from_numpy(chosen.copy()) if len(chosen) else torch.full((batch.input_ids.shape[0],), -1)
            batch.extra[NUMBERS] = numbers.to(batch.input_ids.device)
        return made


def switch_dropout_off(model: nn.Module) -> None:
    """Let no module drop anything."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0


def read_job(job: ConfigJob, world: int) -> tuple[DictConfig, ParallelLayout, BatchPlan]:
    """Return a job's effective config, its layout and its batch; the model's size is complete.

    Raises:
        DufuError: a setting that cannot be.
    """
    for package in job.trust:
        trust(package)
    config = call_config(job.source, list(job.overrides), list(job.data))
    layout = layout_from_config(config.train, world)
    complete_model_config(config, tokenizer_from_config(config))
    return config, layout, plan_batch(config.train, layout.data)


def verify_job(job: ConfigJob, world: int) -> None:
    """Raise the error with which a job would end before its first step, as far as it can be known without data and processes.

    Raises:
        DufuError: the model cannot have the layout, or a setting cannot be.
    """
    config, layout, _ = read_job(job, world)
    precision_from_config(config.train.amp, torch.device("cpu"))
    with torch.device("meta"):
        model: nn.Module = instantiate(config.model)
    rehearse(model, layout)
    length = config.dataloader.dataset.get("sequence_length") if isinstance(config.dataloader.dataset, DictConfig) else None
    view = getattr(model, "view", None)
    if length and view is not None:  # what cannot be cut, or is too long once padded, shows in the first batch
        view(Batch(torch.zeros(1, int(length), dtype=torch.int64), torch.zeros(1, int(length), dtype=torch.int64)))


def record_config(job: ConfigJob) -> RankRecord:
    """Make a job's updates on this process and return what it saw."""
    config, layout, plan = read_job(job, world_size())
    settle_allocator()
    processes = join(layout, choose_device(config.train.input_placement_device))
    precision = precision_from_config(config.train.amp, processes.device)
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    dataset = _dataset(config, job, processes)
    feed = Feed(dataset, plan.global_batch, config.train.seed, config.dataloader.shuffle)
    distributed = build_model(config, processes, precision)
    if not job.dropout:
        switch_dropout_off(distributed.model)
    optimizer, limit, norm_type = build_optimizer(config, distributed)
    with redirect_stderr(StringIO()):  # that there is no warm-up is our own choice
        schedule = build_schedule(config, optimizer)
    scaler = LossScaler(config.train.amp) if precision.scaled else None
    step = RecordedStep(distributed, optimizer, schedule, precision, scaler, limit, norm_type)
    batches = NumberedBatches(feed, plan, processes.data.rank, processes.data.size, config.train.seed, processes.device)
    try:
        first = batches.step(0, 0, last=True)[0]
        lengths = [part.input_ids.shape[1] for part in (first, first.decoder) if part is not None]
        return Recorder(step, *lengths).run(job.steps, lambda number: batches.step(number, number * plan.global_batch, last=True))
    finally:
        batches.close()
        torch.compiler.reset()  # a later job of this process must not reach the limit of compiled variants


def _dataset(config: DictConfig, job: ConfigJob, processes: Processes) -> Any:
    dataset = build_dataset(config, tokenizer_from_config(config), "train", processes)
    return UnequallyScored(dataset) if job.made_up else dataset


__all__ = ["ConfigJob", "read_job", "record_config", "switch_dropout_off", "verify_job"]
