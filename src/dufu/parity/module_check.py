"""`dufu.check`: a config, or any PyTorch module with a batch of its own, in several layouts against one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from dufu.compat import storage_identity
from dufu.config.lazy import as_config
from dufu.config.overrides import apply_overrides
from dufu.config.schema import SECTIONS, to_dict
from dufu.data.feed import micro_batches, shares
from dufu.errors import ConfigError, DufuError, LayoutError
from dufu.layers.loss import IGNORE
from dufu.layers.random import token_keys
from dufu.models.chain import Batch
from dufu.models.huggingface import OutsideModel
from dufu.optim.schedules import Schedule
from dufu.parallel.build import distribute
from dufu.parallel.layout import ParallelLayout, layout_from_config
from dufu.parallel.layout_text import ONE, LayoutText, parse_layout, parse_layouts
from dufu.parallel.outside import describe_weights, is_transformers
from dufu.parallel.pool import Pool
from dufu.parallel.process import choose_device, join, world_size
from dufu.parallel.rehearsal import rehearse
from dufu.parity.check import NEUTRAL, SAY, Checker, Report, check_config, tolerance_of, verify_all, versions
from dufu.parity.comparison import Tolerance
from dufu.parity.recorded_run import switch_dropout_off
from dufu.parity.recorder import NUMBERS, RecordedStep, Recorder
from dufu.parity.recording import RankRecord
from dufu.training.batch_size import BatchPlan, plan_batch
from dufu.training.precision import LossScaler, precision_from_config

Loss = Callable[[Any, Any], Tensor]
TARGET = "labels"  # the field of a dict that is the target where `loss` is given; of a tuple it is the last one


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise DufuError where two parameters are one tensor, which no layout could keep equal."""
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        other = seen.setdefault(storage_identity(parameter), name)
        if other != name:
            raise DufuError(
                f"{other} and {name} are two parameters on one tensor; assign one parameter to both places "
                f"(model.a.weight = model.b.weight)"
            )


class _Child(nn.Module):
    """A child of an nn.Sequential as a unit of the chain."""

    def __init__(self, block: nn.Module, chain: PlainChain, last: bool) -> None:
        super().__init__()
        self.block = block
        self._ends: tuple[PlainChain, bool] = (chain, last)  # in a tuple, so that the chain is no submodule

    def forward(self, state: Any, batch: Batch) -> Any:
        """Run the child; the first one takes the batch's input, the last one's output becomes the loss."""
        chain, last = self._ends
        arguments, named = chain.inputs(batch)
        output = self.block(*arguments, **named) if state is None else self.block(state)
        return chain.sums(output, batch) if last else output


class PlainChain(nn.Module):
    """Any module as dufu's step runs it: the children of an nn.Sequential are units, another module is one.

    Args:
        model: called with the batch's fields; gives a mean over samples, or a loss (N,) for each sample.
        loss: of the output and the target, where the model gives none.
        names: the batch's fields, in order.
        positional: whether the model takes them by position.
    """

    objectives = {"loss": "samples"}  # noqa: RUF012 - as in ChainModel

    def __init__(self, model: nn.Module, loss: Loss | None, names: Sequence[str], positional: bool) -> None:
        super().__init__()
        self.model, self.loss, self.names, self.positional = model, loss, list(names), positional
        children = list(model.children()) if isinstance(model, nn.Sequential) else [model]
        self._chain = [_Child(child, self, child is children[-1]) for child in children]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Name modules, and so parameters, as the user's model does."""
        named: Iterator[tuple[str, nn.Module]] = self.model.named_modules(memo, prefix, remove_duplicate)
        return named

    def units(self) -> dict[str, nn.Module]:
        """Return the units in order; their names end in a number, as those of layers do."""
        return {f"model.{number}": child for number, child in enumerate(self._chain)}

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return how many samples are scored."""
        return {"samples": int((batch.extra[NUMBERS] >= 0).sum())}

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch as it is."""
        return batch

    def inputs(self, batch: Batch) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the model's arguments by position and by name."""
        names = self.names if self.loss is None else [name for name in self.names if name != self._target]
        if self.positional:
            return [batch.extra[name] for name in names], {}
        return [], {name: batch.extra[name] for name in names}

    @property
    def _target(self) -> str:
        return self.names[-1] if self.positional else TARGET

    def sums(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the loss, summed over samples, and their number."""
        value = output if self.loss is None else self.loss(output, batch.extra[self._target])
        scored = batch.extra[NUMBERS] >= 0
        if not isinstance(value, Tensor) or value.shape not in ((), scored.shape):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise DufuError(
                f"the loss is {shape} for {len(scored)} samples; it should be their mean, or one number for each; "
                f"give loss= where the model returns something else"
            )
        total = value * scored.sum() if value.dim() == 0 else torch.where(scored, value, torch.zeros_like(value)).sum()
        return {"loss": total, "samples": scored.sum()}

    def forward(self, batch: Batch) -> Any:
        """Run the chain."""
        state: Any = None
        for unit in self._chain:
            state = unit(state, batch)
        return state


@dataclass(frozen=True)
class ModuleJob:
    """What to record.

    Args:
        model, loss: see PlainChain.
        fields: the batch, samples first.
        positional: whether the model takes the fields by position.
        overrides: of the `train` and `graph` sections, those of the layout last.
        steps: number of updates.
        learning_rate: of AdamW.
        dropout: whether dropout runs.
    """

    model: nn.Module
    loss: Loss | None
    fields: dict[str, Tensor]
    positional: bool
    overrides: tuple[str, ...]
    steps: int
    learning_rate: float
    dropout: bool = True

    @property
    def samples(self) -> int:
        """Return the size of the batch."""
        return len(next(iter(self.fields.values())))

    def chain(self) -> PlainChain | OutsideModel:
        """Return a copy of the model on the meta device."""
        model = copy.deepcopy(self.model)
        describe_weights(model)
        if is_transformers(model):
            return OutsideModel(model)
        return PlainChain(model, self.loss, list(self.fields), self.positional)

    def settings(self, world: int) -> tuple[DictConfig, ParallelLayout, BatchPlan]:
        """Return the settings, the layout and the batch's sizes."""
        config: DictConfig = as_config({name: to_dict(cls()) for name, cls in SECTIONS.items() if name in ("train", "graph")})
        apply_overrides(config, [f"train.global_batch_size={self.samples}", *self.overrides])
        layout = layout_from_config(config.train, world)
        return config, layout, plan_batch(config.train, layout.data)


class _Constant(Schedule):
    def inner(self, base: float, t: int) -> float:
        return base


def record_module(job: ModuleJob) -> RankRecord:
    """Make a job's updates on this process, always of the same batch, and return what it saw."""
    config, layout, plan = job.settings(world_size())
    processes = join(layout, choose_device(config.train.input_placement_device))
    torch.manual_seed(config.train.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    precision = precision_from_config(config.train.amp, processes.device)
    checkpointing = config.train.activation_checkpoint
    distributed = distribute(
        job.chain,
        processes,
        lambda model: [{"params": [p for p in model.parameters() if p.requires_grad]}],
        seed=config.train.seed,
        compute_dtype=precision.compute_dtype,
        master=precision.master,
        recompute=checkpointing.mode if checkpointing.enabled else None,
        compile_units=config.graph.enabled,
    )
    if not job.dropout:
        switch_dropout_off(distributed.model)
    optimizer = torch.optim.AdamW(distributed.groups, lr=job.learning_rate)
    scaler = LossScaler(config.train.amp) if precision.scaled else None
    step = RecordedStep(distributed, optimizer, _Constant(optimizer, 1 << 30), precision, scaler, 0.0, 2.0)
    made = _micro_batches(job.fields, plan, processes.data.rank, processes.data.size)
    if isinstance(distributed.model, OutsideModel):
        made = (_token_batch(distributed.model, batch.extra, config.train.seed) for batch in made)
    batches = [b.to(processes.device) for b in made]
    try:
        return Recorder(step, 1 << 30).run(job.steps, lambda number: batches)
    finally:
        torch.compiler.reset()


def _micro_batches(fields: dict[str, Tensor], plan: BatchPlan, rank: int, size: int) -> Iterator[Batch]:
    """Yield a process's micro-batches; one without a sample scores nothing."""
    import numpy as np

    parts = shares(np.arange(plan.global_batch), size)
    for chosen in micro_batches(parts[rank], len(parts[0]), plan.micro):
        rows = torch.from_numpy(chosen.copy()) if len(chosen) else torch.zeros(1, dtype=torch.int64)
        numbers = rows if len(chosen) else torch.full_like(rows, -1)
        yield Batch(rows[:, None], extra={NUMBERS: numbers, **{name: value[rows] for name, value in fields.items()}})


def _token_batch(model: OutsideModel, fields: dict[str, Tensor], seed: int) -> Batch:
    """Return a batch as dufu's models take it out of what transformers' models take; a sample of number -1 is not scored."""
    numbers, ids, mask = fields[NUMBERS], fields["input_ids"], fields.get("attention_mask")
    labels = fields["labels"].masked_fill((numbers < 0).view(-1, *[1] * (fields["labels"].dim() - 1)), IGNORE)
    extra = {NUMBERS: numbers}
    if model.by_sample:
        extra["sentence_labels"] = labels
    elif model.causal:  # theirs are the tokens themselves, ours those that follow
        labels = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)), 1)
    return Batch(
        ids,
        None if model.by_sample else labels,
        positions=fields.get("position_ids"),
        keys=token_keys(seed, 0, numbers, torch.arange(ids.shape[1]).expand_as(ids)),
        padding=None if mask is None else mask.bool(),
        token_types=fields.get("token_type_ids"),
        extra=extra,
    )


_TOKEN_FIELDS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels")


def _check_token_fields(fields: dict[str, Tensor], positional: bool, loss: Loss | None) -> None:
    """Raise DufuError where a batch is none that a transformers model can be checked with."""
    if loss is not None:
        raise DufuError("check: a transformers model has a loss of its own; leave loss= out, and give labels")
    strange = [name for name in fields if name not in _TOKEN_FIELDS]
    if positional or strange or not {"input_ids", "labels"} <= set(fields):
        what = f"has {strange[0]}" if strange and not positional else "is no dict with input_ids and labels"
        raise DufuError(f"check: the batch {what}; a transformers model takes a dict of {', '.join(_TOKEN_FIELDS)}")


class ModuleSubject:
    """A module and a batch; see Subject."""

    def __init__(self, job: ModuleJob) -> None:
        self.plain, self.steps, self.name = job, job.steps, type(job.model).__name__

    def _job(self, layout: LayoutText, dropout: bool = True) -> ModuleJob:
        foreign = next((o for o in layout.options if not o.lstrip("+~").startswith(("train.", "graph."))), None)
        if foreign:
            raise ConfigError(f"{foreign}: a module is checked with settings of train and graph only")
        return replace(self.plain, overrides=(*self.plain.overrides, *layout.overrides), dropout=dropout)

    def verify(self, layout: LayoutText) -> None:
        """See Subject."""
        job = self._job(layout)
        config, parallel, _ = job.settings(layout.world)
        precision_from_config(config.train.amp, torch.device("cpu"))
        if parallel.sequence or parallel.context > 1:
            raise LayoutError("sp and cp divide the positions of dufu's own batches; a plain module has dp, zero, tp, ep and pp")
        rehearse(job.chain(), parallel)

    def reference(self, layout: LayoutText) -> LayoutText:
        """See Subject."""
        one = parse_layout(ONE[0])
        return LayoutText(one.text, 1, one.dist, tuple(o for o in layout.options if not o.startswith(NEUTRAL)))

    def tolerance(self, layout: LayoutText) -> Tolerance:
        """See Subject."""
        return tolerance_of(self._job(layout).settings(layout.world)[0])

    def parallel_layout(self, layout: LayoutText) -> ParallelLayout:
        """See Subject."""
        return self._job(layout).settings(layout.world)[1]

    def job(self, layout: LayoutText, dropout: bool) -> tuple[Callable[..., RankRecord], tuple[Any, ...]]:
        """See Subject."""
        return record_module, (self._job(layout, dropout),)


def check(
    model: nn.Module | str | Path,
    batch: Any = None,
    layouts: str | Sequence[str] = "dp2,zero3",
    *,
    loss: Loss | None = None,
    steps: int = 3,
    learning_rate: float = 1e-3,
    overrides: Sequence[str] = (),
    data: Sequence[str] = (),
    pool: Pool | None = None,
) -> Report:
    """Compare layouts with one process: losses, gradients, every unit, and the parameters after some updates.

    A module is trained with AdamW on one batch. dp and zero suit every module whose loss is a mean over samples, tp those built from
    dufu's layers, pp an nn.Sequential whose children are the units. The processes import the module's class, and the loss, by name.
    An unmodified transformers model takes a dict with labels, has its own loss, and runs in dp, zero, tp and pp as it does in a recipe.

    Args:
        model: a module, or a config: a recipe's name, a file or a run's folder.
        batch: of a module: a tensor, or a tuple or dict of tensors, with samples first; `model(*batch)`, or `model(**batch)`, gives the
            mean loss over samples, or (N,) losses. None for a config.
        layouts: texts such as "dp2,tp2xpp2:recompute"; `dufu show layouts` prints the grammar.
        loss: of a module's output and the target, which is then the last of a tuple or the dict's "labels"; at the top of a file.
        steps: number of updates.
        learning_rate: of a module's updates.
        overrides: `key=value` texts; of a module those of `train` and `graph`.
        data: of a config: files; none = made-up text.
        pool: processes to use; None = own ones.

    Returns:
        A report, true if every layout agrees; `print(report)` shows it as Markdown.

    Raises:
        DufuError: a layout that the model cannot have, or another mistake; before any work.
    """
    text = layouts if isinstance(layouts, str) else ",".join(layouts)
    if not isinstance(model, nn.Module):
        if batch is not None or loss is not None:
            raise DufuError("check: batch and loss go with a module; a config has a dataset and objectives of its own")
        return check_config(model, overrides, layouts=text, data=data, steps=steps, pool=pool)
    refuse_shared_memory(model)
    fields, positional = _fields(batch, loss)
    if is_transformers(model):
        _check_token_fields(fields, positional, loss)
    job = ModuleJob(model, loss, fields, positional, tuple(overrides), steps, learning_rate)
    try:
        pickle.dumps(job)
    except Exception as error:
        raise DufuError(
            f"check: the processes cannot be given the model or the loss ({error}); define them at the top of a file"
        ) from error
    subject, chosen = ModuleSubject(job), parse_layouts(text)
    verify_all(subject, chosen)
    with ExitStack() as stack:
        checker = Checker(subject, pool or stack.enter_context(Pool()), None, SAY)
        checker.pool.grow(max(layout.world for layout in chosen))
        findings = [checker.check(layout) for layout in chosen]
    facts = {**versions(), "batch": f"{job.samples} samples", "compared with": "one process"}
    return Report(subject.name, steps, findings, facts)


def _fields(batch: Any, loss: Loss | None) -> tuple[dict[str, Tensor], bool]:
    """Return a batch's tensors by name, and whether they go by position."""
    positional = not isinstance(batch, dict)
    parts = [batch] if isinstance(batch, Tensor) else list(batch.values()) if isinstance(batch, dict) else list(batch or ())
    names = [str(name) for name in batch] if isinstance(batch, dict) else [f"field {number}" for number in range(len(parts))]
    if not parts or not all(isinstance(part, Tensor) and part.dim() for part in parts) or len({len(part) for part in parts}) > 1:
        raise DufuError(
            "check: the batch is a tensor, or a tuple or dict of tensors, all with as many samples in the first dimension"
        )
    if loss is not None and (TARGET not in names if not positional else len(parts) < 2):
        raise DufuError(f'check: loss= needs a target: the last of a tuple of two or more, or "{TARGET}" of a dict')
    return dict(zip(names, parts)), positional


__all__ = ["check"]
