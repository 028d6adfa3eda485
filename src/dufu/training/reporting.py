"""The hooks that report: numbers of each logging period, evaluation, and the picture of the loss."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from dufu.errors import NonFiniteError
from dufu.training.evaluation import evaluate, metrics_of, reduce_totals
from dufu.training.hooks import Hook
from dufu.training.precision import Precision
from dufu.training.sink import Sink, eta
from dufu.training.step import Totals

if TYPE_CHECKING:
    from dufu.training.loop import Trainer


class MetricsHook(Hook):
    """Writes one record a logging period.

    Args:
        sink: where it goes.
        period: steps of a period.
        skips_allowed: whether a non-finite gradient is left out (fp16, or `train.non_finite=skip`) instead of ending the run.
    """

    def __init__(self, sink: Sink, period: int, skips_allowed: bool) -> None:
        self.sink, self.period, self.skips_allowed = sink, period, skips_allowed
        self._steps = 0  # of the running period
        self._skipped = 0
        self._saved: dict[str, float] = {}  # sums of the running period before this process began
        self._began = time.monotonic()
        self._steps_here = 0
        self._tokens_here = 0.0

    def before_train(self, trainer: Trainer) -> None:
        """See Hook."""
        self._began = time.monotonic()

    def after_step(self, trainer: Trainer) -> None:
        """See Hook."""
        self._steps += 1
        self._steps_here += 1
        step = trainer.train_step
        self._skipped += step.skipped
        first_bad = step.skipped and not self.skips_allowed
        # An early end leaves the running period to the checkpoint, so that the file reads as if nothing had happened.
        if trainer.step % self.period == 0 or (trainer.finished and trainer.ending) or first_bad:
            self._report(trainer)
        if first_bad:
            numbers = trainer.batches.feed.step_numbers(trainer.consumed - trainer.batches.plan.global_batch)
            raise NonFiniteError(
                f"step {trainer.step}: the gradient norm is {float(step.grad_norm)}; the update was not made. The batch holds samples "
                f"{numbers[0]} to {numbers[-1]} of the run; set train.non_finite=skip to leave such steps out"
            )

    def _report(self, trainer: Trainer) -> None:
        step = trainer.train_step
        now = time.monotonic()
        sums = reduce_totals(step.totals, step.distributed)
        here = dict(sums)
        for name, value in self._saved.items():
            sums[name] = sums.get(name, 0.0) + value
        seconds = (now - self._began) / max(1, self._steps_here)
        found = metrics_of(sums, step.distributed.model.objectives)
        record: dict[str, Any] = {
            "step": trainer.step,
            "loss": found.pop("loss"),
            "grad_norm": float(step.grad_norm),
            "lr": step.lr,
            "tokens": int(sums["tokens"]),
            "samples": trainer.consumed,
            "tokens_per_second": here["tokens"] / max(1e-9, now - self._began),
            "step_seconds": seconds,
            **found,
        }
        if self._skipped:
            record |= {"skipped": True, "skipped_steps": self._skipped}
        if step.scaler:
            record["loss_scale"] = step.scaler.scale
        self.sink.write(record)
        left = eta(trainer.last_step - trainer.step, seconds)
        self.sink.say(
            f"step {trainer.step}/{trainer.train_iter}  loss {record['loss']:.4f}  norm {record['grad_norm']:.3f}  "
            f"lr {step.lr:.2e}  {record['tokens_per_second']:.0f} tokens/s  left {left}"
            + (f"  skipped {self._skipped}" if self._skipped else "")
        )
        step.totals = Totals()
        self._steps = self._steps_here = self._skipped = 0
        self._saved = {}
        self._began = now

    def running(self, trainer: Trainer) -> dict[str, Any]:
        """Return the state of an unfinished period; called by every process, since it sums over them."""
        sums = reduce_totals(trainer.train_step.totals, trainer.train_step.distributed)
        for name, value in self._saved.items():
            sums[name] = sums.get(name, 0.0) + value
        return {"steps": self._steps, "skipped": self._skipped, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Hook."""
        if state:
            self._steps, self._skipped = int(state["steps"]), int(state["skipped"])
            self._saved = {name: float(value) for name, value in state["sums"].items()}


class EvaluationHook(Hook):
    """Evaluates every period and at the end, and keeps the best value.

    Args:
        sink: where the records go.
        dataset: validation samples.
        period: steps between evaluations.
        micro: samples of a forward.
        precision: of the forward.
        limit: most forwards on a process.
        metric, mode: what is best.
        patience, min_delta: early stopping; None = never.
    """

    def __init__(
        self, sink: Sink, dataset: Any, period: int, micro: int, precision: Precision, limit: int, metric: str, mode: str,
        patience: int | None, min_delta: float,
    ) -> None:  # fmt: skip
        self.sink, self.dataset, self.period, self.micro, self.precision, self.limit = (
            sink,
            dataset,
            period,
            micro,
            precision,
            limit,
        )
        self.metric, self.mode, self.patience, self.min_delta = metric, mode, patience, min_delta
        self.best: float | None = None
        self.best_step = 0
        self.bad = 0
        self.improved = False  # at the present step
        self.last: dict[str, float] = {}

    def after_step(self, trainer: Trainer) -> None:
        """See Hook."""
        self.improved = False
        if trainer.step % self.period and not (trainer.finished and trainer.ending):
            return
        self.last = evaluate(trainer.train_step.distributed, self.dataset, self.micro, self.precision, self.limit)
        self.sink.write({"step": trainer.step, "split": "valid", **self.last})
        shown = "  ".join(f"{k} {v:.4f}" for k, v in self.last.items() if k != "tokens")
        self.sink.say(f"step {trainer.step}  validation: {shown}")
        if self.metric not in self.last:
            from dufu.errors import ConfigError, nearest

            raise ConfigError(f'train.evaluation.eval_metric="{self.metric}" is not measured{nearest(self.metric, self.last)}')
        value = self.last[self.metric]
        if not math.isfinite(value):
            return
        sign = -1.0 if self.mode == "min" else 1.0
        if self.best is None or sign * value > sign * self.best + self.min_delta:
            self.best, self.best_step, self.bad, self.improved = value, trainer.step, 0, True
        else:
            self.bad += 1
            if self.patience is not None and self.bad >= self.patience:
                self.sink.say(
                    f"step {trainer.step}: no better {self.metric} in {self.bad} evaluations; stopping "
                    f"(best {self.best:.6g} at step {self.best_step})"
                )
                trainer.stop()

    def state_dict(self) -> dict[str, Any]:
        """See Hook."""
        return {"best": self.best, "best_step": self.best_step, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Hook."""
        self.best, self.best_step, self.bad = state["best"], state["best_step"], state["bad"]
