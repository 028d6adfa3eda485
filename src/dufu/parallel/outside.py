"""Any module, as it is, over several processes: laid out in place, its gradients complete when backward ends.

The module keeps its own forward and its user's own loop. Its weights are those that it has, so they are described by their values, and
then placed as those of every model are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dufu.compat import after_backward
from dufu.errors import DufuError, LayoutError
from dufu.layers.dropout import name_places
from dufu.layers.initial import Given
from dufu.layers.random import token_keys
from dufu.models.huggingface.outline import NoChain, find_blocks
from dufu.models.huggingface.plans import install_plan
from dufu.models.huggingface.randomness import Keys, install_dropout
from dufu.parallel.build import Distributed, distribute
from dufu.parallel.layout import ParallelLayout
from dufu.parallel.process import Processes

REST = "outside the blocks"  # the unit of a module's parameters that lie in none of its blocks


def describe_weights(model: nn.Module) -> None:
    """Let each module say that its weights begin as they are, and put them on the meta device; shared ones stay shared."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        own = {leaf: p for leaf, p in module._parameters.items() if p is not None}
        for leaf, parameter in own.items():
            if parameter not in moved:
                moved[parameter] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            module._parameters[leaf] = moved[parameter]
        if own:
            module.initial = {leaf: Given(parameter.detach()) for leaf, parameter in own.items()}  # type: ignore[assignment]


def is_transformers(model: nn.Module) -> bool:
    """Say whether a module is a transformers model; its package is not imported to find out."""
    return any(c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in type(model).__mro__)


class _Rest(nn.Module):
    """A model without its blocks, as a unit: it begins and ends when the model does."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__()
        self._model: tuple[nn.Module, list[nn.Module]] = (model, blocks)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters outside the blocks, and those that blocks share with what is outside."""
        model, blocks = self._model
        inside = {id(m) for block in blocks for m in block.modules()}
        owners = [m for m in model.modules() if id(m) not in inside]
        yield from dict.fromkeys(p for m in owners for p in m._parameters.values() if p is not None)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Register a hook of the model."""
        return self._model[0].register_forward_pre_hook(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Register a hook of the model."""
        return self._model[0].register_forward_hook(*args, **kwargs)


def _units(model: nn.Module) -> dict[str, nn.Module]:
    """Return a transformers model's blocks and the rest as units; another module is one."""
    try:
        name, blocks = find_blocks(model)
    except NoChain:
        return {"model": model}
    return {REST: _Rest(model, blocks), **{f"{name}.{i}": block for i, block in enumerate(blocks)}}


class Placed:
    """A module that was laid out in place.

    Args:
        distributed: the module and its store.
        average: whether gradients are averaged over the data-parallel processes, or summed.
    """

    def __init__(self, distributed: Distributed, average: bool) -> None:
        self.distributed, self.store = distributed, distributed.store
        self.processes: Processes = distributed.processes
        self.layout = distributed.processes.layout
        self.factor = 1.0 / self.layout.data if average else 1.0
        self._open = self._waiting = False
        model: nn.Module = distributed.model
        model.register_forward_pre_hook(self._begin)
        for info in self.store.infos:
            if info.parameter.requires_grad:
                info.parameter.register_post_accumulate_grad_hook(self._seen)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        """A forward begins: where gradients are wanted, they can be summed while the backward that follows runs."""
        if torch.is_grad_enabled():
            self._prepare()

    def _prepare(self) -> None:
        if self.store.sharded and not self._open:
            self._scale(1.0 / self.factor)  # what is there from earlier backwards is averaged already
        self._open = True
        self.store.start_backward(0, True)

    def _seen(self, parameter: Tensor) -> None:
        if not self._waiting:
            self._waiting = True
            after_backward(self._complete)

    def _complete(self) -> None:
        """Backward has ended: complete the gradients."""
        if not self._open:  # a second backward after one forward
            self._prepare()
        self._open = self._waiting = False
        self.store.end_backward(0, True)
        self.store.finish()
        self._scale(self.factor)

    def _scale(self, factor: float) -> None:
        if factor != 1.0:
            for entry in self.store.entries:
                if entry.tensor.grad is not None:
                    entry.tensor.grad.mul_(factor)

    def optimizer(self, make: Callable[..., torch.optim.Optimizer], **settings: Any) -> torch.optim.Optimizer:
        """Return an optimizer over what this process holds; see `dufu.distributed.optimizer`."""
        made = make([{"params": [entry.tensor for entry in self.store.entries]}], **settings)

        def publish(*_: Any) -> None:
            self.store.publish()

        made.register_step_post_hook(publish)
        return made


_placed: WeakKeyDictionary[nn.Module, Placed] = WeakKeyDictionary()
_sharded: list[ref[nn.Parameter]] = []


def _refuse_sharded(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Refuse to step over parameters whose gradients and values are elsewhere."""
    held = {id(p()) for p in _sharded if p() is not None}
    if held and any(id(p) in held for group in optimizer.param_groups for p in group["params"]):
        raise DufuError(
            f"{type(optimizer).__name__} was made of a model's parameters, which ZeRO shards; "
            f"make it with dufu.distributed.optimizer(model, {type(optimizer).__name__}, lr=…)"
        )


def placed(model: nn.Module) -> Placed:
    """Return what is known of a module that was laid out.

    Raises:
        DufuError: it was not.
    """
    if model not in _placed:
        raise DufuError(f"{type(model).__name__} was not laid out by dufu.parallelize")
    return _placed[model]


def check_outside(model: nn.Module, layout: ParallelLayout) -> None:
    """Raise LayoutError where a layout is none that a module in a loop of its own can have."""
    for name, size in (("pp", layout.pipeline), ("cp", layout.context), ("ep", layout.expert), ("sp", int(layout.sequence) + 1)):
        if size > 1:
            raise LayoutError(
                f"parallelize() lays a module out by dp, tp and zero, not by {name}; a recipe with dufu.train has the other layouts"
            )
    if layout.shard is not None:
        raise LayoutError("parallelize() shards over all data-parallel processes; leave out shardN")


def lay_out(
    model: nn.Module, layout: ParallelLayout, processes: Processes, average: bool, seed: int, recompute: str | None
) -> Placed:
    """Lay a module out in place.

    Args:
        average: average gradients over the data-parallel processes, or sum them.
        seed: of the dropout masks of a transformers model.
        recompute: None, "full" or "selective": of a transformers model's blocks.

    Raises:
        LayoutError: a layer does not divide, or there are no blocks to recompute.
    """
    if recompute and len(_units(model)) == 1:
        raise LayoutError(f"{type(model).__name__} has no list of blocks to recompute")
    if is_transformers(model):
        keys = install_dropout(model)
        install_plan(model)  # after the dropouts, some of which it divides
        name_places(model)
        model.register_forward_pre_hook(_key_setter(keys, processes, seed), with_kwargs=True)
        if recompute:
            model.register_forward_pre_hook(_without_cache, with_kwargs=True)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            values = tensor.detach().to(processes.device).contiguous()
            processes.world.broadcast_(values)
            tensor.copy_(values)
    describe_weights(model)

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]

    distributed = distribute(lambda: model, processes, groups, seed=seed, units=_units(model), recompute=recompute)
    for module in model.modules():
        vars(module).pop("initial", None)  # the whole weights, which nobody needs any more
    result = Placed(distributed, average)
    _placed[model] = result
    if layout.zero_stage and layout.replicas > 1:
        if not _sharded:
            register_optimizer_step_pre_hook(_refuse_sharded)
        _sharded.extend(ref(info.parameter) for info in distributed.store.infos)
    return result


def _without_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let no block add to a cache what it would add again when it is recomputed."""
    taken = "use_cache" in inspect.signature(type(module).forward).parameters
    return (args, {**kwargs, "use_cache": False}) if taken and torch.is_grad_enabled() else None


def _key_setter(keys: Keys, processes: Processes, seed: int) -> Callable[..., None]:
    """Return a hook that gives each forward keys of its own: the number of the call, and the samples' numbers in the global batch."""
    calls = 0

    def set_keys(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal calls
        first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim()), None)
        keys.now = keys.make = None
        if not module.training or first is None:
            return
        step, device = calls, first.device
        samples = torch.arange(first.shape[0], device=device) + processes.data.rank * first.shape[0]

        def make(length: int) -> Tensor:
            return token_keys(seed, step, samples, torch.arange(length, device=device).expand(len(samples), -1))

        keys.make = make
        keys.now = make(first.shape[1] if first.dim() == 2 else 1)
        calls += 1

    return set_keys


__all__ = ["Placed", "check_outside", "describe_weights", "is_transformers", "lay_out", "placed"]
