"""The hook that keeps a process in step with its company: the launcher, the other processes, and the thread that explains a stuck one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from dufu.config.load import LazyConfig
from dufu.parallel.agree import Facts, agree, versions
from dufu.parallel.build import chain_units
from dufu.parallel.launch import note_step
from dufu.parallel.watch import name_units
from dufu.training.hooks import Hook
from dufu.training.resuming import leaves

if TYPE_CHECKING:
    from dufu.training.loop import Trainer

# Files may lie elsewhere on another host: what is in them is compared by the data's fingerprint.
_PLACES = ("dataloader.data", "dataloader.cache_dir")


class Company(Hook):
    """Before the first step, compares what all processes must have in common; then tells the launcher each step. The first hook.

    Args:
        config: the effective config.
        fingerprint: of the data and their order.
    """

    def __init__(self, config: DictConfig, fingerprint: str) -> None:
        self.config, self.fingerprint = config, fingerprint

    def before_train(self, trainer: Trainer) -> None:
        """See Hook."""
        distributed = trainer.train_step.distributed
        name_units(chain_units(distributed.model))
        agree(distributed.processes, self._facts(trainer))
        note_step(trainer.step)

    def before_step(self, trainer: Trainer) -> None:
        """See Hook."""
        note_step(trainer.step)

    def _facts(self, trainer: Trainer) -> Facts:
        distributed = trainer.train_step.distributed
        values: Any = OmegaConf.to_container(OmegaConf.create(LazyConfig.to_yaml(self.config)), resolve=True)
        config = {path: repr(value) for name in values for path, value in leaves(values[name], name).items()}
        return {
            "versions": versions(),
            "config": {path: value for path, value in config.items() if not path.startswith(_PLACES)},
            "data": {"the fingerprint": self.fingerprint},
            "state": {"the number of finished steps": str(trainer.step), "the number of consumed samples": str(trainer.consumed)},
            f"model (stage {distributed.processes.pipeline.rank})": {i.name: str(list(i.shape)) for i in distributed.infos},
        }
