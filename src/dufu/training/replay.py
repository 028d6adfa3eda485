"""A step whose numbers are not finite: say where that began, keep what shows it, and make it again in one process.

The update of such a step is not made, and every number is a function of the step's; so the step can be made again exactly, in the run itself
and later from `RUN/nonfinite/step_N`, which holds a checkpoint, the batch (`batch.safetensors`) and what is known of them (`replay.json`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace as replaced
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dufu.config.schema import defaults
from dufu.data.feed import collate, micro_batches, shares
from dufu.errors import CheckpointError, DufuError
from dufu.interchange.files import write_text
from dufu.models.chain import Batch
from dufu.parallel.layout import layout_from_config
from dufu.parallel.process import choose_device, join, leave, settle_threads, world_size
from dufu.training.anomaly import SAMPLES, ExaminedStep, Finding
from dufu.training.batches import blank, to_batch
from dufu.training.checkpoint import CheckpointReader, load_weights, step_folder
from dufu.training.effective import effective_config
from dufu.training.evaluation import metrics_of, reduce_totals
from dufu.training.optimizer import build_optimizer, build_schedule
from dufu.training.precision import LossScaler, precision_from_config
from dufu.training.pretrained import with_base
from dufu.training.saving import CheckpointHook
from dufu.training.step import TrainStep
from dufu.training.writing import Writing, take_pieces

if TYPE_CHECKING:
    from dufu.training.loop import Trainer

Numbers = npt.NDArray[np.int64]
_FACTS, _BATCH = "replay.json", "batch.safetensors"


def explain_nonfinite(trainer: Trainer) -> str:
    """Make the step just done again, keep it, and return where its numbers stopped being finite; every process calls it alike.

    Returns:
        A sentence or two for the user; never an error, which would hide what it explains.
    """
    try:
        # Once an update is made the step cannot be made again; what is found then is how the weights after it stand.
        number = trainer.step - 1 if trainer.train_step.skipped else trainer.step
        consumed = trainer.consumed - (trainer.batches.plan.global_batch if trainer.train_step.skipped else 0)
        finding = ExaminedStep(trainer.train_step).examine(number, _batches_of(trainer, number, consumed))
        folder = _keep(trainer, number, consumed, finding)
    except DufuError as error:
        return f"The step could not be kept ({error})"
    where = (
        f"First not finite: {finding}." if finding else "Every unit's output and gradient is finite when the step is made again."
    )
    return where + (f" `dufu train --replay {folder}` makes the step again in one process" if folder else "")


def _batches_of(trainer: Trainer, step: int, consumed: int) -> list[Batch]:
    """Return this process's micro-batches of a step, with the numbers of their samples."""
    source = trainer.batches
    numbers = source.feed.step_numbers(consumed)
    parts = shares(numbers, source.data_size)
    made = []
    for chosen in micro_batches(parts[source.data_rank], len(parts[0]), source.plan.micro):
        real = chosen if len(chosen) else numbers[:1]
        batch = to_batch(source.feed.load(real), real, source.seed, step, source.device)
        made.append(_numbered(batch, real) if len(chosen) else _numbered(blank(batch), np.full(1, -1, dtype=np.int64)))
    return made


def _numbered(batch: Batch, numbers: Numbers) -> Batch:
    return replaced(batch, extra={**batch.extra, SAMPLES: torch.from_numpy(numbers).to(batch.input_ids.device)})


def _keep(trainer: Trainer, step: int, consumed: int, finding: Finding | None) -> Path | None:
    """Write what making the step again needs; return the folder, or None for a run that keeps nothing."""
    saver = next((hook for hook in trainer.hooks if isinstance(hook, CheckpointHook)), None)
    if saver is None:
        return None
    parts, feed = trainer.train_step, trainer.batches.feed
    processes = parts.distributed.processes
    folder = saver.folder.parent / "nonfinite" / step_folder(step + 1)
    state = {
        **saver.facts,
        "step": step,
        "consumed_samples": consumed,
        "finished": False,
        "train_iter": trainer.train_iter,
        "layout": str(processes.layout),
        "scaler": parts.scaler.state_dict() if parts.scaler else None,
        "hooks": {},
    }
    pieces = take_pieces(parts.distributed.store, parts.optimizer, processes, False)
    writing = Writing(folder, processes, pieces, state, saver.config)
    writing.begin()

    def add_batch() -> None:
        numbers = feed.step_numbers(consumed)
        arrays = {name: np.ascontiguousarray(value) for name, value in collate(feed.load(numbers)).items()}
        save_file({**arrays, SAMPLES: numbers}, str(folder / _BATCH))
        items, epochs = feed.items(numbers)
        facts = {
            "step": step,
            "seed": trainer.batches.seed,
            "micro_batch": trainer.batches.plan.micro,
            "items": items.tolist(),
            "epochs": epochs.tolist(),
            "layout": str(processes.layout),
            "first_not_finite": str(finding) if finding else None,
        }
        write_text(folder / _FACTS, json.dumps(facts, indent=1))

    writing.finish(add_batch)
    return folder


def replay(folder: str | Path) -> str:
    """Make a kept step again in this process, and return what was found.

    Args:
        folder: `RUN/nonfinite/step_N`.

    Raises:
        CheckpointError: the folder holds no such step, or it is damaged.
    """
    path = Path(folder)
    facts, arrays = _read(path)
    reader = CheckpointReader(path)
    own = [*defaults("train.dist"), *defaults("train.zero_optimization"), "train.activation_checkpoint.enabled=false",
           "graph.enabled=false"]  # fmt: skip
    config = effective_config(path / "config.yaml", own)
    if world_size() > 1:
        raise CheckpointError(f"--replay {path}: one process makes the step again, not {world_size()}")
    from dufu.training.run import build_model

    settle_threads(1)
    processes = join(layout_from_config(config.train, 1), choose_device(config.train.input_placement_device))
    try:
        if config.train.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        precision = precision_from_config(config.train.amp, processes.device)
        distributed = build_model(config, processes, precision)
        load_weights(with_base(reader, config.model, distributed.store.shapes), distributed.store)
        distributed.store.publish()
        optimizer, limit, norm_type = build_optimizer(config, distributed)
        scaler = LossScaler(config.train.amp) if precision.scaled else None
        if scaler and reader.state["scaler"]:
            scaler.load_state_dict(reader.state["scaler"])
        step = ExaminedStep(
            TrainStep(distributed, optimizer, build_schedule(config, optimizer), precision, scaler, limit, norm_type)
        )
        finding = step.examine(facts["step"], _saved_batches(facts, arrays, processes.device), inside=True)
        loss = metrics_of(reduce_totals(step.totals, distributed), distributed.model.objectives)["loss"]
        return _report(path, facts, step, finding, float(loss))
    finally:
        leave()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    try:
        facts: dict[str, Any] = json.loads((path / _FACTS).read_text(encoding="utf-8"))
        return facts, load_file(path / _BATCH)
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        kept = sorted(str(p.parent) for p in path.glob(f"**/{_FACTS}"))
        hint = f"; there is {', '.join(kept)}" if kept else ""
        raise CheckpointError(f"--replay {path}: not a folder such as RUN/nonfinite/step_0000100 ({error}){hint}") from error


def _saved_batches(facts: Mapping[str, Any], arrays: dict[str, npt.NDArray[Any]], device: torch.device) -> list[Batch]:
    """Return the whole global batch in micro-batches of the run's size."""
    numbers = arrays[SAMPLES]
    samples = [{name: value[row] for name, value in arrays.items() if name != SAMPLES} for row in range(len(numbers))]
    made = []
    for rows in micro_batches(np.arange(len(numbers)), len(numbers), facts["micro_batch"]):
        batch = to_batch([samples[row] for row in rows], numbers[rows], facts["seed"], facts["step"], device)
        made.append(_numbered(batch, numbers[rows]))
    return made


def _report(path: Path, facts: Mapping[str, Any], step: ExaminedStep, finding: Finding | None, loss: float) -> str:
    numbers = f"{facts['step'] + 1} of {path}, made again in one process (the run: {facts['layout']})"
    lines = [f"step {numbers}: loss {loss:.6g}, gradient norm {float(step.grad_norm):.6g}"]
    if finding is None:
        lines.append("every unit's output and gradient is finite here")
        if facts["first_not_finite"]:
            lines.append(f"in the run, first not finite: {facts['first_not_finite']}")
        return "\n".join(lines)
    lines.append(f"first not finite: {finding}")
    if step.module:
        lines.append(f"first module whose output is not finite: {step.module}")
    return "\n".join(lines)
