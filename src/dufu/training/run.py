"""Train a config from beginning to end: the one place where all parts meet."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from dufu.config.instantiate import instantiate
from dufu.config.load import LazyConfig
from dufu.data.feed import Feed
from dufu.errors import CheckpointError, ConfigError
from dufu.models.chain import ChainModel
from dufu.parallel.build import Distributed, distribute
from dufu.parallel.layout import layout_from_config
from dufu.parallel.process import Processes, choose_device, join, leave, settle_allocator, settle_threads, world_size
from dufu.training.batch_size import plan_batch
from dufu.training.batches import TrainingBatches
from dufu.training.checkpoint import CheckpointReader, latest_checkpoint, load_optimizer, load_weights
from dufu.training.data import build_dataset, complete_model_config, save_tokenizer, tokenizer_from_config
from dufu.training.effective import effective_config, refuse_unbuilt, seconds
from dufu.training.evaluation import evaluate
from dufu.training.hooks import Hook
from dufu.training.loop import Trainer
from dufu.training.optimizer import build_optimizer, build_schedule
from dufu.training.precision import LossScaler, Precision, precision_from_config
from dufu.training.reporting import EvaluationHook, MetricsHook
from dufu.training.resuming import compare_configs, inherit_batch
from dufu.training.saving import CheckpointHook
from dufu.training.sink import Sink, trim_metrics
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
        eval_only: evaluate the run's newest checkpoint instead of training.
        fast_dev_run: a short trial.
        allow_change: keys that may differ from the resumed run's though they change the mathematics.
        hooks: run after dufu's own.

    Raises:
        DufuError: a user's mistake, before any work is spent.
    """
    if isinstance(source, (str, Path)) and Path(source).is_dir():
        overrides = [*overrides, f"train.output_dir='{source}'"]
    config = effective_config(source, overrides, data, fast_dev_run)
    refuse_unbuilt(config)
    layout = layout_from_config(config.train, world_size())
    settle_allocator()
    settle_threads(1)
    processes = join(layout, choose_device(config.train.input_placement_device))
    try:
        if config.train.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        return _Run(config, processes, resume, allow_change).go(eval_only, hooks)
    finally:
        leave()


class _Run:
    """The parts of a run, built in order."""

    def __init__(self, config: DictConfig, processes: Processes, resume: bool, allow_change: Sequence[str]) -> None:
        self.config, self.processes = config, processes
        self.folder = Path(config.train.output_dir)
        self.checkpoints = self.folder / "checkpoints"
        self.reader = self._claim_folder(resume)
        self.tokenizer = tokenizer_from_config(config)
        complete_model_config(config, self.tokenizer)
        if self.reader is not None:
            inherit_batch(config, self.reader)
        self.plan = plan_batch(config.train, processes.layout.data)
        config.train.global_batch_size = self.plan.global_batch
        if self.reader is not None:
            compare_configs(self.reader, config, allow_change)
        self.precision = precision_from_config(config.train.amp, processes.device)

    def _claim_folder(self, resume: bool) -> CheckpointReader | None:
        """Take the run's folder, or refuse; return the checkpoint to resume from."""
        found = latest_checkpoint(self.checkpoints)
        used = found is not None or (self.folder / "metrics.jsonl").exists()
        reader = None
        if resume:
            reader = CheckpointReader(found, verify=self.processes.is_main) if found else None
        elif used and not self.config.train.overwrite:
            raise ConfigError(
                f"train.output_dir={self.folder} already holds a run; continue it with --resume, replace it with "
                f"train.overwrite=true, or choose another folder"
            )
        self.processes.world.barrier()
        if self.processes.is_main:
            if used and not resume:
                for name in ("checkpoints", "tensorboard"):
                    shutil.rmtree(self.folder / name, ignore_errors=True)
                for name in ("metrics.jsonl", "log.txt"):
                    (self.folder / name).unlink(missing_ok=True)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.processes.world.barrier()
        return reader

    def go(self, eval_only: bool, extra: Sequence[Hook]) -> Outcome:
        """Build the rest and train (or evaluate)."""
        config, train, processes = self.config, self.config.train, self.processes
        valid = build_dataset(config, self.tokenizer, "valid", processes, required=eval_only)
        distributed = build_model(config, processes, self.precision)
        optimizer, limit, norm_type = build_optimizer(config, distributed)
        sink = Sink(self.folder if processes.is_main else None, train.tensorboard)
        if eval_only:
            return self._evaluate_only(distributed, valid, sink)
        dataset = build_dataset(config, self.tokenizer, "train", processes)
        feed = Feed(dataset, self.plan.global_batch, train.seed, config.dataloader.shuffle)
        self._settle_lengths(len(dataset))
        schedule = build_schedule(config, optimizer)
        scaler = LossScaler(train.amp) if self.precision.scaled else None
        facts = {"seed": train.seed, "global_batch": self.plan.global_batch, "fingerprint": feed.fingerprint()}
        text = LazyConfig.to_yaml(config)
        step = TrainStep(distributed, optimizer, schedule, self.precision, scaler, limit, norm_type)
        batches = TrainingBatches(feed, self.plan, processes.data.rank, processes.data.size, train.seed, processes.device)
        own = self._hooks(sink, valid, text, facts, scaler)
        trainer = Trainer(step, batches, [*own, *extra], train.train_iter, train.stop_at_step, seconds(train.stop_after))
        if self.reader is not None:
            self._restore(trainer, feed, sink)
        elif train.load_weight:
            load_weights(CheckpointReader(_checkpoint_of(train.load_weight)), distributed.store)
        if processes.is_main:
            (self.folder / "config.yaml").write_text(text, encoding="utf-8")
            save_tokenizer(self.tokenizer, self.folder)
        sink.say(
            f"{processes.layout}: {sum(math.prod(i.shape) for i in distributed.infos):,} parameters, {len(dataset):,} samples, "
            f"global batch {self.plan.global_batch} ({self.plan.micro} × {self.plan.accumulation} a process), {self.precision.level}"
        )
        if trainer.step >= trainer.train_iter:
            sink.say(f"the run is finished: {trainer.step} of {trainer.train_iter} steps are done; raise train.train_iter to go on")
        else:
            trainer.run()
        evaluation = next((h for h in own if isinstance(h, EvaluationHook)), None)
        sink.close()
        return Outcome(trainer.step, trainer.finished, evaluation.last if evaluation else {}, trainer.signal, self.folder)

    def _hooks(self, sink: Sink, valid: Any, text: str, facts: dict[str, Any], scaler: LossScaler | None) -> list[Hook]:
        train = self.config.train
        hooks: list[Hook] = [MetricsHook(sink, train.log_period, bool(scaler) or train.non_finite == "skip")]
        if train.evaluation.enabled and valid is not None:
            evaluation = train.evaluation
            hooks.append(
                EvaluationHook(
                    sink, valid, evaluation.eval_period, train.test_micro_batch_size, self.precision, int(evaluation.eval_iter),
                    evaluation.eval_metric, evaluation.eval_mode, train.early_stopping.patience, train.early_stopping.min_delta,
                )
            )  # fmt: skip
        saver = train.checkpointer
        hooks.append(CheckpointHook(sink, self.checkpoints, saver.period, saver.max_to_keep, text, facts))
        return hooks

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
        for name, value in (("train_iter", train.train_iter), ("log_period", train.log_period),
                            ("checkpointer.period", train.checkpointer.period), ("evaluation.eval_period", train.evaluation.eval_period)):  # fmt: skip
            if value < 1:
                raise ConfigError(f"train.{name}={value}: at least 1")

    def _restore(self, trainer: Trainer, feed: Feed, sink: Sink) -> None:
        """Take over everything that a checkpoint holds."""
        reader = self.reader
        assert reader is not None
        state = reader.state
        if state["fingerprint"] != feed.fingerprint():
            raise CheckpointError(
                f"{reader.folder}: the training data or their order differ from the run's (fingerprint {state['fingerprint']}, "
                f"now {feed.fingerprint()}); give the same files, tokenizer, sequence length, split and seed"
            )
        store = trainer.train_step.distributed.store
        load_weights(reader, store)
        load_optimizer(reader, store, trainer.train_step.optimizer)
        if trainer.train_step.scaler and state["scaler"]:
            trainer.train_step.scaler.load_state_dict(state["scaler"])
        trainer.step, trainer.consumed = state["step"], state["consumed_samples"]
        for hook in trainer.hooks:
            saved = state["hooks"].get(type(hook).__name__)
            if saved is not None and not (isinstance(hook, MetricsHook) and not self.processes.is_main):
                hook.load_state_dict(saved)
            elif isinstance(hook, MetricsHook) and saved:
                hook.load_state_dict({**saved, "sums": {}})
        if self.processes.is_main:
            trim_metrics(self.folder / "metrics.jsonl", trainer.step)
        sink.reopen()
        sink.say(f"resumed at step {trainer.step} from {reader.folder} (written as {state['layout']})")

    def _evaluate_only(self, distributed: Distributed, valid: Any, sink: Sink) -> Outcome:
        reader = self.reader
        weights = self.config.train.load_weight
        if reader is None:
            reader = CheckpointReader(_checkpoint_of(weights or str(self.folder)))
        load_weights(reader, distributed.store)
        found = evaluate(distributed, valid, self.config.train.test_micro_batch_size, self.precision)
        sink.say("  ".join(f"{k} {v:.6g}" for k, v in found.items()))
        sink.close()
        return Outcome(int(reader.state["step"]), True, found, None, self.folder)


def _checkpoint_of(folder: str) -> Path:
    """Return the checkpoint that a path names: itself, or the newest of a run's folder."""
    path = Path(folder)
    if (path / "manifest.json").is_file():
        return path
    found = latest_checkpoint(path / "checkpoints") or latest_checkpoint(path)
    if found is None:
        raise CheckpointError(f"{path}: neither a checkpoint nor a run's folder with a complete one")
    return found


def build_model(config: DictConfig, processes: Processes, precision: Precision, trained: bool = True) -> Distributed:
    """Return the model of a config, laid out over the processes, its weights made from the seed.

    Args:
        trained: whether there will be gradients; otherwise nothing is prepared for an optimizer.
    """

    def make() -> ChainModel:
        model: ChainModel = instantiate(config.model)
        return model

    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        if not trained:
            model.requires_grad_(False)
            return []
        if "optim" not in config:
            raise ConfigError('the config has no section "optim"')
        found: list[dict[str, Any]] = instantiate(config.optim.params, model=model)
        return found

    checkpointing = config.train.activation_checkpoint
    return distribute(
        make,
        processes,
        groups,
        seed=config.train.seed,
        compute_dtype=precision.compute_dtype,
        master=precision.master and trained,
        recompute=checkpointing.mode if checkpointing.enabled else None,
        compile_units=config.graph.enabled,
    )


__all__ = ["Outcome", "train"]
