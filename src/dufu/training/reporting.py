"""The hooks that report: numbers of each logging period, evaluation, and the picture of the loss."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dufu.errors import NonFiniteError
from dufu.training.averaging import averaged
from dufu.training.evaluation import check_metric_name, evaluate, gather_totals, metrics_of, reduce_totals
from dufu.training.hooks import Hook
from dufu.training.metrics import Metric
from dufu.training.picture import draw_losses
from dufu.training.precision import Precision
from dufu.training.sink import Sink, eta
from dufu.training.step import Totals

if TYPE_CHECKING:
    from dufu.training.loop import Trainer


class MetricsHook(Hook):
    """Writes one record a logging period. The first hook, so that what the others take is not counted as time of a step.

    Args:
        sink: where it goes.
        period: steps of a period.
        skips_allowed: whether a non-finite gradient is left out (fp16, or `train.non_finite=skip`) instead of ending the run.
    """

    def __init__(self, sink: Sink, period: int, skips_allowed: bool) -> None:
        self.sink, self.period, self.skips_allowed = sink, period, skips_allowed
        self._trainer: Trainer | None = None
        self._skipped = 0  # of the running period
        self._saved: dict[str, list[float]] = {}  # each process's sums of a period that an earlier process began
        self._tokens_before = 0.0
        self._steps = 0  # of the period, in this process
        self._seconds = 0.0
        self._clock = 0.0

    def before_train(self, trainer: Trainer) -> None:
        """See Hook."""
        self._trainer = trainer
        self._take_over(trainer)
        self.sink.start_progress(trainer.step, trainer.last_step)

    def _take_over(self, trainer: Trainer) -> None:
        """Begin with the sums of the unfinished period: each process with its own, so that every further sum is the same to the last
        bit; in another layout the first process with all of them.
        """
        if not trainer.train_step.distributed.runner.has_result:
            self._tokens_before, self._saved = sum(self._saved.get("tokens", [])), {}
            return
        replicas = trainer.train_step.distributed.processes.replicas
        for name, parts in self._saved.items():
            mine = parts[replicas.rank] if len(parts) == replicas.size else sum(parts) if replicas.rank == 0 else 0.0
            value = torch.tensor(mine, dtype=torch.float64, device=trainer.train_step.distributed.processes.device)
            trainer.train_step.totals.sums[name] = value
        self._tokens_before = sum(self._saved.get("tokens", []))
        self._saved = {}

    def before_step(self, trainer: Trainer) -> None:
        """See Hook."""
        self._clock = time.perf_counter()

    def after_step(self, trainer: Trainer) -> None:
        """See Hook."""
        self._seconds += time.perf_counter() - self._clock
        self._steps += 1
        step = trainer.train_step
        self._skipped += step.skipped
        bad = step.skipped and not self.skips_allowed
        # An early end leaves the running period to the checkpoint, so that the file reads as if nothing had happened.
        if trainer.step % self.period == 0 or (trainer.finished and trainer.ending) or bad:
            loss = self._report(trainer)
            bad = bad or not (self.skips_allowed or math.isfinite(loss))
        self.sink.progress(trainer.step)
        if bad:
            from dufu.training.replay import explain_nonfinite  # which keeps a checkpoint, and so imports what imports this

            raise NonFiniteError(f"{_blame(trainer)}. {explain_nonfinite(trainer)}")

    def _report(self, trainer: Trainer) -> float:
        step = trainer.train_step
        sums = reduce_totals(step.totals, step.distributed)
        found = metrics_of(sums, step.distributed.model.objectives)
        seconds = self._seconds / self._steps
        record: dict[str, Any] = {
            "step": trainer.step,
            "loss": found.pop("loss"),
            "grad_norm": float(step.grad_norm),
            "lr": step.lr,
            "tokens": int(sums["tokens"]),
            "samples": trainer.consumed,
            "tokens_per_second": (sums["tokens"] - self._tokens_before) / max(1e-9, self._seconds),
            "step_seconds": seconds,
            **found,
        }
        if self._skipped:
            record |= {"skipped": True, "skipped_steps": self._skipped}
        if step.scaler:
            record["loss_scale"] = step.scaler.scale
        self.sink.write(record)
        self.sink.say(
            f"step {trainer.step}/{trainer.train_iter}  loss {record['loss']:.4f}  norm {record['grad_norm']:.3f}  "
            f"lr {step.lr:.2e}  {record['tokens_per_second']:.0f} tokens/s  left {eta(trainer.last_step - trainer.step, seconds)}"
            + (f"  skipped {self._skipped}" if self._skipped else "")
        )
        step.totals = Totals()
        self._steps = self._skipped = 0
        self._seconds = self._tokens_before = 0.0
        # A period that scored nothing has no loss, which is no defect of the numbers.
        return float(record["loss"]) if sums["tokens"] else 0.0

    def after_train(self, trainer: Trainer) -> None:
        """Report the rest of a period that early stopping cut short: no more steps will follow."""
        if trainer.finished and self._steps:
            self._report(trainer)
        self.sink.stop_progress()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the unfinished period, each process's own; see Hook."""
        assert self._trainer is not None
        step = self._trainer.train_step
        return {"skipped": self._skipped, "parts": gather_totals(step.totals, step.distributed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Hook."""
        self._skipped = int(state["skipped"])
        self._saved = {name: [float(v) for v in parts] for name, parts in state["parts"].items()}


def _blame(trainer: Trainer) -> str:
    """Say which batch a number that is none came from."""
    step, feed = trainer.train_step, trainer.batches.feed
    numbers = feed.step_numbers(trainer.consumed - trainer.batches.plan.global_batch)
    items = ", ".join(str(i) for i in feed.items(numbers)[0][:8]) + (", …" if len(numbers) > 8 else "")
    what = f"the gradient norm is {float(step.grad_norm)}; the update was not made" if step.skipped else "the loss is not finite"
    return (
        f"step {trainer.step}: {what}. The batch holds samples {numbers[0]} to {numbers[-1]} of the run (items {items} of the data); "
        f"set train.non_finite=skip to leave such steps out"
    )


def better_when(metric: str) -> str:
    """Return "min" for losses and perplexities, "max" for all other metrics."""
    return "min" if metric.lower().endswith(("loss", "perplexity", "ppl")) else "max"


class EvaluationHook(Hook):
    """Evaluates every period and at the end, and keeps the best value.

    Args:
        sink: where the records go.
        dataset: validation samples.
        micro: samples of a forward.
        precision: of the forward.
        metrics: measured beside the model's own.
        settings: `train.evaluation`.
        stopping: `train.early_stopping`.
    """

    def __init__(
        self, sink: Sink, dataset: Any, micro: int, precision: Precision, metrics: Sequence[Metric], settings: Any, stopping: Any
    ) -> None:
        self.sink, self.dataset, self.micro, self.precision, self.metrics = sink, dataset, micro, precision, metrics
        self.period, self.limit = int(settings.eval_period), int(settings.eval_iter) * micro
        self.metric, self.mode = settings.eval_metric, settings.eval_mode or better_when(settings.eval_metric)
        self.patience, self.min_delta = stopping.patience, float(stopping.min_delta)
        self.best: float | None = None
        self.best_step = 0
        self.bad = 0
        self.improved = False  # at the present step
        self.last: dict[str, float] = {}

    def before_train(self, trainer: Trainer) -> None:
        """See Hook."""
        check_metric_name(self.metric, trainer.train_step.distributed.model.objectives, self.metrics)

    def after_step(self, trainer: Trainer) -> None:
        """See Hook."""
        self.improved = False
        if trainer.step % self.period and not (trainer.finished and trainer.ending):
            return
        distributed = trainer.train_step.distributed
        with averaged(trainer):
            self.last = evaluate(distributed, self.dataset, self.micro, self.precision, self.limit, self.metrics)
        self.sink.write({"step": trainer.step, "split": "valid", **self.last})
        shown = "  ".join(f"{k} {v:.4f}" for k, v in self.last.items() if k != "tokens")
        self.sink.say(f"step {trainer.step}  validation: {shown}")
        self._judge(trainer, self.last.get(self.metric, math.nan))

    def _judge(self, trainer: Trainer, value: float) -> None:
        """Keep the best value; a value that is no number is never better."""
        sign = -1.0 if self.mode == "min" else 1.0
        if math.isfinite(value) and (self.best is None or sign * value > sign * self.best + self.min_delta):
            self.best, self.best_step, self.bad, self.improved = value, trainer.step, 0, True
            return
        self.bad += 1
        if self.patience is not None and self.bad >= self.patience:
            found = "no finite value so far" if self.best is None else f"best {self.best:.6g} at step {self.best_step}"
            self.sink.say(f"step {trainer.step}: no better {self.metric} in {self.bad} evaluations; stopping ({found})")
            trainer.stop()

    def state_dict(self) -> dict[str, Any]:
        """See Hook."""
        return {"best": self.best, "best_step": self.best_step, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Hook."""
        self.best, self.best_step, self.bad = state["best"], state["best_step"], state["bad"]


class PictureHook(Hook):
    """Draws `loss.png` at the end. The last hook, after the last record was written.

    Args:
        sink: whose folder gets it.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def after_train(self, trainer: Trainer) -> None:
        """See Hook."""
        if self.sink.folder is not None and not trainer.failed:
            with self.sink.disk():
                draw_losses(self.sink.folder)
