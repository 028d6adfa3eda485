"""Train a config from beginning to end: the one place where all parts meet."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from dufu.config.instantiate import instantiate
from dufu.config.load import LazyConfig
from dufu.data.feed import Feed
from dufu.errors import CheckpointError, ConfigError, DufuError
from dufu.interchange.files import write_text
from dufu.interchange.folder import is_folder
from dufu.models.chain import ChainModel
from dufu.models.lora import is_adapter
from dufu.parallel.build import Distributed, distribute
from dufu.parallel.launch import note_step, speak_for_all
from dufu.parallel.layout import layout_from_config
from dufu.parallel.process import (
    Processes,
    choose_device,
    join,
    leave,
    local_processes,
    settle_allocator,
    settle_threads,
    world_size,
)
from dufu.training.adapters import adapter_of, base_facts, compare_base
from dufu.training.averaging import Averages, averages_of
from dufu.training.batch_size import plan_batch
from dufu.training.batches import TrainingBatches
from dufu.training.checkpoint import (
    AVERAGE,
    CheckpointReader,
    find_weights,
    latest_checkpoint,
    load_optimizer,
    load_weights,
)
from dufu.training.company import Company
from dufu.training.data import build_dataset, complete_model_config, save_tokenizer, tokenizer_from_config
from dufu.training.effective import effective_config, refuse_unbuilt, seconds
from dufu.training.evaluation import check_metric_name, evaluate
from dufu.training.folder import RunFolder
from dufu.training.hooks import Hook, build_hooks, named
from dufu.training.loop import Surroundings, Trainer
from dufu.training.metrics import build_metrics
from dufu.training.optimizer import build_optimizer, build_schedule
from dufu.training.precision import LossScaler, Precision, precision_from_config
from dufu.training.pretrained import first_weights, keep_origin, left_out, open_weights, with_base
from dufu.training.reporting import EvaluationHook, MetricsHook, PictureHook
from dufu.training.resuming import compare_configs, inherit_batch, may_change_data, same_optimizer
from dufu.training.saving import CheckpointHook
from dufu.training.sink import Sink
from dufu.training.step import TrainStep


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended.

    Args:
        step: updates done.
        finished: whether the run has come to its end.
        metrics: the last evaluation's.
        signal: the signal that ended it early, if one did.
        folder: the run's folder.
    """

    step: int
    finished: bool
    metrics: dict[str, float]
    signal: int | None
    folder: Path


def train(
    source: str | Path | DictConfig,
    overrides: Sequence[str] = (),
    *,
    data: Sequence[str] = (),
    resume: bool = False,
    eval_only: bool = False,
    fast_dev_run: bool = False,
    allow_change: Sequence[str] = (),
    hooks: Sequence[Hook] = (),
) -> Outcome:
    """Train a model as a config says, in the layout it says, on the processes that were started.

    Args:
        source: a recipe's name, a `.py` or `.yaml` file, a run's folder, or a config.
        overrides: `key=value` texts.
        data: files that replace `dataloader.data`.
        resume: continue the run in `train.output_dir` (or in the folder `source`) from its newest checkpoint.
        eval_only: evaluate the run's newest checkpoint (or `train.load_weight`) instead of training.
        fast_dev_run: a short trial.
        allow_change: keys that may differ from the resumed run's though they change the mathematics.
        hooks: run after dufu's own, but before the one that writes checkpoints, which hold their state.

    Raises:
        DufuError: a user's mistake, before any work is spent.
    """
    config = call_config(source, overrides, data, fast_dev_run)
    layout = layout_from_config(config.train, world_size())
    settle_allocator()
    settle_threads(local_processes())
    if not config.train.rdma_enabled:
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    timeout = seconds(config.train.dist.timeout, "train.dist.timeout")
    if not timeout:
        raise ConfigError(f'train.dist.timeout="{config.train.dist.timeout}": a time above 0, such as "30min"')
    processes = join(layout, choose_device(config.train.input_placement_device), timeout)
    try:
        if config.train.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        if eval_only:
            return _evaluate_only(config, processes)
        return _Run(config, processes, resume, allow_change, overrides).go(hooks)
    except BaseException:
        speak_for_all()  # before this process's connections close, which is what the others then fail of
        raise
    finally:
        leave()


def call_config(
    source: str | Path | DictConfig, overrides: Sequence[str] = (), data: Sequence[str] = (), fast_dev_run: bool = False
) -> DictConfig:
    """Return the effective config of a call of `train`.

    A run's folder gives its saved config, without what belonged to the call that saved it: where that one stopped early and whether it
    replaced another run.
    """
    of_run = isinstance(source, (str, Path)) and Path(source).is_dir()
    if of_run:
        overrides = ["train.stop_at_step=null", "train.stop_after=null", "train.overwrite=false", *overrides]
    config = effective_config(source, overrides, data, fast_dev_run)
    if of_run:
        config.train.output_dir = str(source)
    refuse_unbuilt(config)
    return config


class _Run:
    """The parts of a run, built in order."""

    def __init__(
        self, config: DictConfig, processes: Processes, resume: bool, allow_change: Sequence[str], overrides: Sequence[str]
    ) -> None:
        self.config, self.processes, self.allow_change = config, processes, allow_change
        self.stop_after = seconds(config.train.stop_after)
        self.left_out = ""
        self.begun_anew: set[str] = set()  # weights that the first ones' source does not hold
        self.folder = RunFolder(Path(config.train.output_dir), processes, resume, config.train.overwrite)
        self.reader = self.folder.reader
        self.tokenizer = tokenizer_from_config(config, None if self.reader is None else self.folder.path / "tokenizer")
        complete_model_config(config, self.tokenizer)
        if self.reader is not None:
            inherit_batch(config, self.reader, processes.layout.data, overrides)
        self.plan = plan_batch(config.train, processes.layout.data)
        config.train.global_batch_size = self.plan.global_batch
        if self.reader is not None:
            compare_configs(self.reader, config, allow_change)
        self.precision = precision_from_config(config.train.amp, processes.device)
        self.metrics = build_metrics(config.train.evaluation.evaluator)

    def go(self, extra: Sequence[Hook]) -> Outcome:
        """Build the rest and train."""
        config, train, processes = self.config, self.config.train, self.processes
        valid = build_dataset(config, self.tokenizer, "valid", processes, required=False)
        dataset = build_dataset(config, self.tokenizer, "train", processes)
        feed = Feed(dataset, self.plan.global_batch, train.seed, config.dataloader.shuffle)
        self._settle_lengths(len(dataset))
        whole = train.load_weight and not train.allow_missing  # all weights come from there
        loaded = train.get("adapter") is None and bool(self.reader is not None or whole)
        distributed = build_model(config, processes, self.precision, loaded=loaded)
        optimizer, limit, norm_type = build_optimizer(config, distributed)
        schedule = build_schedule(config, optimizer)
        scaler = LossScaler(train.amp) if self.precision.scaled else None
        step = TrainStep(distributed, optimizer, schedule, self.precision, scaler, limit, norm_type)
        batches = TrainingBatches(feed, self.plan, processes.data.rank, processes.data.size, train.seed, processes.device)
        self._check_evaluation(valid, distributed)
        if self.reader is None and train.load_weight:
            self._first_weights(distributed)
        self.base: dict[str, Any] = self.reader.state.get("adapter", {}) if self.reader else base_facts(config, distributed)
        distributed.model.counts(batches.trial())  # samples that the model cannot be trained on are refused here
        self.folder.prepare()  # from here on the folder changes: every mistake that can be found has been
        note_step(0)  # what fails from here on begins again with --resume
        sink = Sink(self.folder.path if processes.is_main else None, train.tensorboard)
        try:
            hooks = self._hooks(sink, valid, feed, scaler, [*build_hooks(train.hooks), *extra])
            around = Surroundings(config, self.folder.path, self.tokenizer)
            trainer = Trainer(step, batches, hooks, train.train_iter, train.stop_at_step, self.stop_after, around)
            self._first_state(trainer, sink)
            if processes.is_main:
                with sink.disk():
                    write_text(self.folder.path / "config.yaml", LazyConfig.to_yaml(config))
                    save_tokenizer(self.tokenizer, self.folder.path)
                    if self.reader is None and train.load_weight and is_folder(Path(train.load_weight)):
                        keep_origin(Path(train.load_weight), self.folder.path)
            sink.say(
                f"{processes.layout}: {sum(math.prod(i.shape) for i in distributed.infos):,} parameters, {len(dataset):,} samples, "
                f"global batch {self.plan.global_batch} ({self.plan.micro} × {self.plan.accumulation} a process), {self.precision.level}"
            )
            if self.left_out:
                sink.say(self.left_out)
            if self.begun_anew:
                sink.say(f"{train.load_weight} does not hold {', '.join(sorted(self.begun_anew))}; they begin anew")
            if train.evaluation.enabled and valid is None:
                sink.say("the validation split is empty; nothing is evaluated")
            if self._anything_left(trainer, sink):
                _run_noting_errors(trainer, sink)
        finally:
            sink.close()
        evaluation = next((h for h in hooks if isinstance(h, EvaluationHook)), None)
        return Outcome(trainer.step, trainer.finished, evaluation.last if evaluation else {}, trainer.signal, self.folder.path)

    def _first_weights(self, distributed: Distributed) -> None:
        """Take the first weights from where the config says."""
        train = self.config.train
        source = first_weights(
            find_weights(train.load_weight), self.config.model, distributed.store.shapes, adapter_of(self.config)
        )
        self.left_out = left_out(getattr(source, "base", source))
        lacking = load_weights(source, distributed.store, False, train.allow_missing, train.allow_unexpected)
        self.begun_anew = {name for name in lacking if not is_adapter(name)}

    def _check_evaluation(self, valid: Any, distributed: Distributed) -> None:
        """Raise where the settings of evaluation, early stopping or averaging cannot be met."""
        train = self.config.train
        if train.ema.enabled:
            Averages(train.ema.decay)
        if train.evaluation.enabled and valid is not None:
            check_metric_name(train.evaluation.eval_metric, distributed.model.objectives, self.metrics)
        elif train.early_stopping.patience is not None:
            why = "the validation split is empty" if train.evaluation.enabled else "train.evaluation.enabled=false"
            raise ConfigError(f"train.early_stopping.patience={train.early_stopping.patience}, but nothing is evaluated: {why}")

    def _hooks(self, sink: Sink, valid: Any, feed: Feed, scaler: LossScaler | None, extra: Sequence[Hook]) -> list[Hook]:
        """Return the hooks in their order: numbers first, the checkpoint when all others have seen the step, the picture last."""
        train, saver = self.config.train, self.config.train.checkpointer
        hooks: list[Hook] = [MetricsHook(sink, train.log_period, bool(scaler) or train.non_finite == "skip")]
        if train.ema.enabled:
            hooks.append(Averages(train.ema.decay))
        if train.evaluation.enabled and valid is not None:
            micro = train.test_micro_batch_size
            hooks.append(EvaluationHook(sink, valid, micro, self.precision, self.metrics, train.evaluation, train.early_stopping))
        fingerprint = feed.fingerprint()
        facts = {"seed": train.seed, "global_batch": self.plan.global_batch, "fingerprint": fingerprint}
        if self.base:
            facts["adapter"] = self.base
        text = LazyConfig.to_yaml(self.config)
        folder, poll = self.folder.checkpoints, train.log_period
        checkpoints = CheckpointHook(sink, folder, saver.period, saver.max_to_keep, saver.async_save, poll, text, facts)
        return [Company(self.config, fingerprint), *hooks, *extra, checkpoints, PictureHook(sink)]

    def _anything_left(self, trainer: Trainer, sink: Sink) -> bool:
        """Say what a finished run is; return whether there are steps to make."""
        if trainer.step >= trainer.train_iter:
            trainer.finished = True
            sink.say(f"the run is finished: {trainer.step} of {trainer.train_iter} steps are done; raise train.train_iter to go on")
        elif trainer.finished:
            sink.say(f"the run is finished: it stopped early at step {trainer.step}; raise train.train_iter to go on")
        elif trainer.step >= trainer.last_step:
            sink.say(f"nothing to do: step {trainer.step} is done and train.stop_at_step={trainer.stop_at_step}")
        else:
            return True
        return False

    def _settle_lengths(self, samples: int) -> None:
        """Turn epochs and ratios into steps, in the effective config."""
        train = self.config.train
        if train.train_epoch:
            train.train_iter = max(train.train_iter, math.ceil(samples * train.train_epoch / self.plan.global_batch))
            train.train_epoch = 0
        if not 0.0 <= train.warmup_ratio < 1.0:
            raise ConfigError(f"train.warmup_ratio={train.warmup_ratio}: in [0, 1)")
        epoch = max(1, samples // self.plan.global_batch)
        if train.checkpointer.save_model_after_n_epoch is not None:
            train.checkpointer.period = train.checkpointer.save_model_after_n_epoch * epoch
        if train.evaluation.eval_after_n_epoch is not None:
            train.evaluation.eval_period = train.evaluation.eval_after_n_epoch * epoch
        for name in ("train_iter", "log_period", "checkpointer.period", "checkpointer.max_to_keep", "evaluation.eval_period",
                     "evaluation.eval_iter", "test_micro_batch_size"):  # fmt: skip
            value = OmegaConf.select(train, name)
            if value < 1:
                raise ConfigError(f"train.{name}={value}: at least 1")

    def _first_state(self, trainer: Trainer, sink: Sink) -> None:
        """Take over everything that a checkpoint holds, or begin anew."""
        if self.reader is not None:
            self._restore(self.reader, trainer)
            sink.resume_at(trainer.step)
            sink.say(f"resumed at step {trainer.step} from {self.reader.folder} (written as {self.reader.state['layout']})")
            return
        if self.folder.resume:
            sink.resume_at(0)
            sink.say(f"{self.folder.path} holds no checkpoint to resume from; starting from the beginning")

    def _restore(self, reader: CheckpointReader, trainer: Trainer) -> None:
        state, step, fingerprint = reader.state, trainer.train_step, trainer.batches.feed.fingerprint()
        if state["fingerprint"] != fingerprint and not may_change_data(self.allow_change):
            raise CheckpointError(
                f"{reader.folder}: the training data or their order differ from the run's (fingerprint {state['fingerprint']}, "
                f"now {fingerprint}); give the same files, tokenizer, sequence length, split and seed, or --allow-change dataloader.data"
            )
        store = step.distributed.store
        load_weights(with_base(reader, self.config.model, store.shapes, self.config.train.load_weight), store)
        compare_base(reader, step.distributed)
        if same_optimizer(reader, self.config):
            load_optimizer(reader, step.distributed.store, step.optimizer)
        averages = averages_of(trainer)
        if averages is not None and reader.has(AVERAGE):
            averages.load(reader, step.distributed.store)
        if step.scaler and state["scaler"]:
            step.scaler.load_state_dict(state["scaler"])
        trainer.step, trainer.consumed = state["step"], state["consumed_samples"]
        # A run that early stopping ended goes on only when it is given more steps.
        trainer.finished = bool(state["finished"]) and trainer.train_iter <= state["train_iter"]
        for name, hook in named(trainer.hooks).items():
            if name in state["hooks"]:
                hook.load_state_dict(state["hooks"][name])


def _run_noting_errors(trainer: Trainer, sink: Sink) -> None:
    try:
        trainer.run()
    except DufuError as error:
        with suppress(DufuError):  # the log may be what cannot be written
            sink.note(f"stopped by an error: {error}")
        raise


def _evaluate_only(config: DictConfig, processes: Processes) -> Outcome:
    """Evaluate the run's newest checkpoint, or else the weights that the config names; nothing is written."""
    train, folder = config.train, Path(config.train.output_dir)
    found = latest_checkpoint(folder / "checkpoints") or find_weights(train.load_weight or folder)
    tokenizer = tokenizer_from_config(config)
    complete_model_config(config, tokenizer)
    precision, metrics = precision_from_config(train.amp, processes.device), build_metrics(train.evaluation.evaluator)
    valid = build_dataset(config, tokenizer, "valid", processes)
    distributed = build_model(config, processes, precision, trained=False, loaded=train.get("adapter") is None)
    source = open_weights(found, config.model, distributed.store.shapes, processes.is_main, train.load_weight)
    load_weights(source, distributed.store, averaged=train.ema.enabled)
    source = getattr(source, "reader", source)
    if isinstance(source, CheckpointReader):
        compare_base(source, distributed)
    state = source.state if isinstance(source, CheckpointReader) else {"step": 0, "finished": False}
    limit = int(train.evaluation.eval_iter) * train.test_micro_batch_size
    values = evaluate(distributed, valid, train.test_micro_batch_size, precision, limit, metrics)
    if processes.is_main:
        print(f"step {state['step']}  validation: " + "  ".join(f"{k} {v:.6g}" for k, v in values.items()), flush=True)
    return Outcome(int(state["step"]), bool(state["finished"]), values, None, folder)


def build_model(
    config: DictConfig, processes: Processes, precision: Precision, trained: bool = True, loaded: bool = False
) -> Distributed:
    """Return the model of a config, laid out over the processes, its weights made from the seed.

    Args:
        trained: whether there will be gradients; otherwise nothing is prepared for an optimizer.
        loaded: whether all weights will be loaded, so that none need be made.

    Raises:
        ConfigError: it is to be trained, but has no objective.
    """

    adapter = adapter_of(config)

    def make() -> ChainModel:
        model: ChainModel = instantiate(config.model)
        if adapter is not None:
            adapter.apply(model)
        return model

    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        if not trained:
            model.requires_grad_(False)
            return []
        if not getattr(model, "objectives", True):
            raise ConfigError(f"model: {type(model).__name__} has nothing to be trained by; choose a class with a head")
        if "optim" not in config:
            raise ConfigError('the config has no section "optim"')
        found: list[dict[str, Any]] = instantiate(config.optim.params, model=model)
        return found

    checkpointing = config.train.activation_checkpoint
    distributed = distribute(
        make,
        processes,
        groups,
        seed=None if loaded else config.train.seed,
        compute_dtype=precision.compute_dtype,
        master=precision.master and trained,
        recompute=checkpointing.mode if checkpointing.enabled else None,
        compile_units=config.graph.enabled,
    )
    distributed.store.saves_frozen = adapter is None
    return distributed


__all__ = ["Outcome", "train"]
