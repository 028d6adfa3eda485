"""Does a layout give the numbers of one process? Run both, compare everything, and say where a difference begins."""

from __future__ import annotations

import hashlib
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from omegaconf import DictConfig, OmegaConf

from dufu.config.load import LazyConfig
from dufu.config.trusted import trust
from dufu.errors import DufuError
from dufu.parallel.layout import ParallelLayout
from dufu.parallel.layout_text import ONE, LayoutText, parse_layout, parse_layouts
from dufu.parallel.pool import Pool, WorkerError
from dufu.parity.comparison import TOLERANCES, Comparison, Tolerance, compare
from dufu.parity.diagnosis import explain
from dufu.parity.made_up import write_made_up_text
from dufu.parity.recorded_run import ConfigJob, read_job, record_config, verify_job
from dufu.parity.recording import RankRecord, Recording, assembled
from dufu.training.data import dataset_class
from dufu.training.run import call_config

# What a layout may change without changing the mathematics; of other options both sides have the same.
NEUTRAL = ("train.dist.", "train.zero_optimization.", "train.activation_checkpoint.", "train.num_accumulation_steps",
            "train.train_micro_batch_size", "graph.")  # fmt: skip
_BATCH = ("train.global_batch_size", "train.train_micro_batch_size", "train.num_accumulation_steps")
SAY: Callable[[str], None] = lambda line: None


@dataclass
class Finding:
    """What came of one layout.

    Args:
        layout: as it was written.
        world: number of processes.
        tolerance: that it was held to.
        comparison: with one process; None where the run failed.
        reason: the likely reason of a difference.
        failure: why there was no result.
        witnesses: of each process what shows that work was divided.
    """

    layout: str
    world: int
    tolerance: Tolerance
    comparison: Comparison | None = None
    reason: str = ""
    failure: str = ""
    witnesses: list[dict[str, Any]] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Say whether the layout gives the numbers of one process."""
        return self.comparison is not None and self.comparison.agrees


@dataclass
class Report:
    """What `check` found.

    Args:
        subject: what was checked.
        steps: number of updates.
        findings: one for each layout.
        facts: versions and the like.
    """

    subject: str
    steps: int
    findings: list[Finding]
    facts: dict[str, str]

    @property
    def agrees(self) -> bool:
        """Say whether every layout gives the numbers of one process."""
        return all(finding.agrees for finding in self.findings)

    def __bool__(self) -> bool:
        return self.agrees

    def __str__(self) -> str:
        from dufu.parity.report import as_markdown

        return as_markdown(self)


class Subject(Protocol):
    """What can be recorded in any layout."""

    name: str
    steps: int

    def verify(self, layout: LayoutText) -> None:
        """Raise DufuError where the layout cannot be."""

    def reference(self, layout: LayoutText) -> LayoutText:
        """Return one process with the options of a layout that are part of the mathematics."""

    def tolerance(self, layout: LayoutText) -> Tolerance:
        """Return how far the layout may be from the reference."""

    def parallel_layout(self, layout: LayoutText) -> ParallelLayout:
        """Return the layout of the processes."""

    def job(self, layout: LayoutText, dropout: bool) -> tuple[Callable[..., RankRecord], tuple[Any, ...]]:
        """Return the function that records it on each process, and its arguments."""


class ConfigSubject:
    """A config.

    Args:
        source: a recipe's name, a file or a run's folder.
        overrides: the user's settings.
        data: files; none = made-up ones.
        steps: number of updates.
        folder: for made-up text and the token cache.
        trust: packages whose classes the config may name.
    """

    def __init__(
        self,
        source: str,
        overrides: Sequence[str],
        data: Sequence[str],
        steps: int,
        folder: Path,
        trust: Sequence[str] = (),
    ) -> None:
        self.name, self.steps, self.trust, self.folder = source, steps, tuple(trust), folder
        self.overrides, self.data = tuple(overrides), tuple(data)
        self.made_up: tuple[str, ...] = ()
        self.batch: tuple[str, ...] = ()
        self.words = 0  # of made-up text

    def prepare(self, layouts: Sequence[LayoutText], made_for: dict[str, Any] | None = None) -> None:
        """Choose what the user did not: a batch that does not divide, a schedule that moves the weights, text.

        Args:
            made_for: what was chosen for a recording (`chosen`), which is chosen again.
        """
        if not _sets(self.overrides, "train.warmup_ratio"):
            self.batch += ("train.warmup_ratio=0",)
        if not _sets(self.overrides, "train.amp.init_scale"):
            self.batch += ("train.amp.init_scale=256",)  # an update that is skipped compares nothing
        if made_for and not any(_sets(self.overrides, key) for key in _BATCH):
            self.batch = tuple(made_for.get("settings", self.batch))
        elif not any(_sets(self.overrides, key) for key in _BATCH):
            data = max((layout.data for layout in layouts), default=1)
            self.batch += (
                f"train.global_batch_size={4 * max(2, data) + 1}",
                "train.train_micro_batch_size=2",
                "train.num_accumulation_steps=null",
            )
        if self.data:
            return
        self.made_up = ("dataloader.weights=null", "dataloader.valid_data=[]", "dataloader.test_data=[]",
                        "dataloader.documents=lines", f"dataloader.cache_dir={self.folder / 'cache'}")  # fmt: skip
        for package in self.trust:
            trust(package)
        settings = call_config(self.name, [*self.batch, *self.overrides, *self.made_up])
        other = getattr(dataset_class(settings), "write_made_up", None)  # of a dataset whose samples are no text
        if other is not None:
            self.data = (str(other(self.folder, settings)),)
            return
        self.data = (str(self.folder / "made_up.txt"),)
        config, _, plan = read_job(self._job(parse_layout(ONE[0]), True), 1)
        length = config.dataloader.dataset.get("sequence_length", 128) if config.dataloader.get("dataset") else 128
        words = max(3000, plan.global_batch * self.steps * int(length or 128))
        self.words = int((made_for or {}).get("words", words))
        write_made_up_text(Path(self.data[0]), self.words, int(config.train.seed))

    @property
    def chosen(self) -> dict[str, Any]:
        """Return what was chosen here, for a recording."""
        return {"settings": list(self.batch), "words": self.words}

    def _job(self, layout: LayoutText, dropout: bool) -> ConfigJob:
        overrides = (*self.batch, *self.overrides, *self.made_up, *layout.overrides)
        return ConfigJob(self.name, overrides, self.data, self.steps, self.trust, dropout, bool(self.made_up))

    def verify(self, layout: LayoutText) -> None:
        """See Subject."""
        verify_job(self._job(layout, True), layout.world)

    def reference(self, layout: LayoutText) -> LayoutText:
        """See Subject."""
        one = parse_layout(ONE[0])
        return LayoutText(one.text, 1, one.dist, tuple(o for o in layout.options if not o.startswith(NEUTRAL)))

    def tolerance(self, layout: LayoutText) -> Tolerance:
        """See Subject."""
        return tolerance_of(read_job(self._job(layout, True), layout.world)[0])

    def parallel_layout(self, layout: LayoutText) -> ParallelLayout:
        """See Subject."""
        return read_job(self._job(layout, True), layout.world)[1]

    def job(self, layout: LayoutText, dropout: bool) -> tuple[Callable[..., RankRecord], tuple[Any, ...]]:
        """See Subject."""
        return record_config, (self._job(layout, dropout),)

    def facts(self) -> dict[str, str]:
        """Return what identifies the config."""
        config, _, plan = read_job(self._job(parse_layout(ONE[0]), True), 1)
        for key in ("cache_dir", "data"):  # of a made-up text the place says nothing
            config.dataloader[key] = None if key == "cache_dir" else ["made-up text"] if self.made_up else list(self.data)
        text = LazyConfig.to_yaml(config)
        return {
            "config": f"{self.name} {' '.join(self.overrides)}".strip(),
            "config sha256": hashlib.sha256(text.encode()).hexdigest()[:16],
            "global batch": f"{plan.global_batch} samples, micro-batches of {plan.micro}",
            "data": "made up: seeded words, unequal numbers of scored tokens" if self.made_up else " ".join(self.data),
        }


def tolerance_of(config: DictConfig) -> Tolerance:
    """Return how far a config's layouts may be from one process, by its precision."""
    if config.train.amp.enabled:
        mixture = bool(OmegaConf.select(config, "model.cfg.num_experts"))
        return TOLERANCES["half mixture" if mixture else config.train.amp.level or "O1"]
    return TOLERANCES["compiled" if config.graph.enabled else "O0"]


def _sets(overrides: Sequence[str], key: str) -> bool:
    return any(o.lstrip("+~").startswith(f"{key}=") for o in overrides)


def versions() -> dict[str, str]:
    """Return what the numbers may depend on besides the config."""
    from dufu import __version__

    return {
        "dufu": __version__, "torch": torch.__version__, "python": platform.python_version(), "system": f"{sys.platform} {platform.machine()}",
    }  # fmt: skip


class Checker:
    """Compares layouts of a subject with one process, whose runs are kept.

    Args:
        subject: verified for every layout.
        pool: processes.
        given: a recording that takes the place of one process's run.
        say: told of progress.
    """

    def __init__(self, subject: Subject, pool: Pool, given: Recording | None = None, say: Callable[[str], None] = SAY) -> None:
        self.subject, self.pool, self.given, self.say = subject, pool, given, say
        self._references: dict[tuple[tuple[str, ...], bool], Recording] = {}

    def record(self, layout: LayoutText, dropout: bool = True) -> Recording:
        """Run a layout and return what its processes saw."""
        function, arguments = self.subject.job(layout, dropout)
        return assembled(self.pool(layout.world, function, *arguments), {"layout": layout.text, **versions()})

    def reference(self, layout: LayoutText, dropout: bool = True) -> Recording:
        """Return what the layout is compared with."""
        if self.given is not None and dropout:
            return self.given
        one = self.subject.reference(layout)
        key = (one.options, dropout)
        if key not in self._references:
            self._references[key] = self.record(one, dropout)
        return self._references[key]

    def check(self, layout: LayoutText) -> Finding:
        """Run a layout, compare it, and look for the reason of a difference.

        Raises:
            DufuError: the layout cannot be.
        """
        tolerance = self.subject.tolerance(layout)
        finding = Finding(layout.text, layout.world, tolerance)
        self.say(f"{layout.text} on {layout.world} process{'es' if layout.world > 1 else ''}")
        try:
            reference = self.reference(layout)
            found = self.record(layout)
        except WorkerError as error:
            finding.failure = str(error)
            return finding
        except DufuError as error:
            raise type(error)(f"layout {layout.text}: {error}") from None
        finding.witnesses, finding.comparison = found.witnesses, compare(reference, found, tolerance)
        if not finding.comparison.agrees:
            finding.reason = self._reason(layout, reference, found, finding.comparison, tolerance)
        return finding

    def _reason(
        self, layout: LayoutText, reference: Recording, found: Recording, comparison: Comparison, tolerance: Tolerance
    ) -> str:
        without: bool | None = None
        if self.given is None and (comparison.begins == 1 or any(d.counts for d in (*comparison.forward, *comparison.gradients))):
            self.say(f"{layout.text} differs; once more without dropout")
            try:
                without = compare(self.reference(layout, False), self.record(layout, False), tolerance).agrees
            except WorkerError:
                without = None
        return explain(reference, found, comparison, self.subject.parallel_layout(layout), tolerance, without)


def check_config(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    layouts: str,
    data: Sequence[str] = (),
    steps: int = 3,
    save_reference: str | Path | None = None,
    reference: str | Path | None = None,
    trust: Sequence[str] = (),
    pool: Pool | None = None,
    say: Callable[[str], None] = SAY,
) -> Report:
    """Compare a config's first steps in several layouts with one process.

    Args:
        source: a recipe's name, a file or a run's folder; the layout that it names plays no part.
        overrides: `key=value` texts.
        layouts: texts separated by commas, such as "dp2,tp2xpp2".
        data: files; none = made-up ones.
        steps: number of updates.
        save_reference: folder to write one process's recording to.
        reference: folder of a recording to compare with, instead of one process's run.
        trust: packages whose classes the config may name.
        pool: processes to use; None = own ones, which end with the call.
        say: told of progress.

    Raises:
        DufuError: a layout that cannot be, or another mistake; before any work.
    """
    chosen = parse_layouts(layouts)
    if steps < 1:
        raise DufuError(f"--steps {steps}: at least 1")
    if reference is not None and save_reference is not None:
        raise DufuError("--reference and --save-reference exclude each other: one reads what the other writes")
    given = None if reference is None else Recording.load(Path(reference))
    if given is not None and given.parameters and given.steps and len(given.steps) != steps:
        raise DufuError(
            f"--steps {steps}: {reference} holds parameters after {len(given.steps)} steps; give --steps {len(given.steps)}"
        )
    if save_reference is not None and (Path(save_reference) / "recording.json").exists():
        raise DufuError(f"{save_reference} holds a recording already; give another folder")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dufu-check-")))
        subject = ConfigSubject(str(source), overrides, data, steps, folder, trust)
        subject.prepare(chosen, given.facts.get("chosen") if given is not None else None)
        verify_all(subject, chosen)
        checker = Checker(subject, pool or stack.enter_context(Pool()), given, say)
        checker.pool.grow(max(layout.world for layout in chosen))
        if save_reference is not None:
            one = checker.reference(parse_layout(ONE[0]))
            one.facts = {**one.facts, **subject.facts(), "chosen": subject.chosen}
            one.save(Path(save_reference))
        findings = [checker.check(layout) for layout in chosen]
        facts = {**versions(), **subject.facts(), "compared with": "one process"}
        if given is not None:
            facts["compared with"] = f"{reference} (config sha256 {given.facts.get('config sha256', 'not recorded')})"
    return Report(str(source), steps, findings, facts)


def verify_all(subject: Subject, layouts: Sequence[LayoutText]) -> None:
    """Raise the first mistake of any layout, naming the layout."""
    for layout in layouts:
        try:
            subject.verify(layout)
        except DufuError as error:
            raise type(error)(f"layout {layout.text}: {error}") from None


__all__ = ["Checker", "ConfigSubject", "Finding", "Report", "check_config", "verify_all"]
