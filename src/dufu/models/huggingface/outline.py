"""A chain out of an unmodified model: its own forward, held up at its blocks.

transformers' models have a list of blocks, and a forward that calls them one after the other. That forward is run three ways. Up to the
first block, which is held up there, it is the chain's first unit. With the state in the place of what the blocks give, it is the last
unit. And with empty weights before the blocks it shows, for each block, the arguments beside the state: masks and rotations, which depend
on the batch alone. So a pipeline's stage needs no weights but its own, and the model's code stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dufu.errors import DufuError

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a block beside the state


class _Reached(Exception):
    """A block is about to run; not an error."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


class NoChain(DufuError):
    """A model's blocks form no chain; the message says why."""


@dataclass
class Outline:
    """What is known of a model's forward.

    Args:
        network: the model.
        name: of its list of blocks.
        blocks: in order.
        before: modules with parameters of their own that run before the first block.
        in_tuple: whether a block gives a tuple with the state in it.
    """

    network: nn.Module
    name: str
    blocks: list[nn.Module]
    before: list[nn.Module]
    in_tuple: bool

    @property
    def after(self) -> list[nn.Module]:
        """Return the modules with parameters of their own that are neither in a block nor before the first one."""
        held = {id(m) for block in self.blocks for m in block.modules()} | {id(m) for m in self.before}
        return [m for m in self.network.modules() if m._parameters and id(m) not in held]

    def _given(self, state: Any) -> Any:
        return (state,) if self.in_tuple else state

    def first_state(self, inputs: Mapping[str, Any]) -> Tensor:
        """Run what comes before the blocks; return the first one's input (B, T, H)."""

        def hold(*args: Any, **kwargs: Any) -> Any:
            raise _Reached(_state_of(args, kwargs)[0])

        with _forwards({self.blocks[0]: hold}):
            try:
                self.network(**inputs)
            except _Reached as reached:
                state: Tensor = reached.state
                return state
        raise DufuError(f"{type(self.network).__name__} ended before its first block")

    def calls(self, inputs: Mapping[str, Any]) -> list[Call]:
        """Return the arguments of each block beside the state."""
        found: list[Call] = []

        def note(*args: Any, **kwargs: Any) -> Any:
            state, rest, named = _state_of(args, kwargs)
            found.append((rest, named))
            if len(found) == len(self.blocks):
                raise _Reached(state)
            return self._given(state)

        with torch.no_grad(), _empty(self.before, self._dtype()), _forwards(dict.fromkeys(self.blocks, note)):
            try:
                self.network(**inputs)
            except _Reached:
                return found
        raise DufuError(f"{type(self.network).__name__} ended before its last block")

    def result(self, inputs: Mapping[str, Any], state: Tensor) -> Any:
        """Run what comes after the blocks, given what the last one gave; return what the model returns."""

        def give(*args: Any, **kwargs: Any) -> Any:
            return self._given(state)

        with _empty(self.before, self._dtype()), _forwards(dict.fromkeys(self.blocks, give)):
            return self.network(**inputs)

    def _dtype(self) -> torch.dtype:
        held = next((p for p in self.network.parameters() if not p.is_meta), None)
        return torch.get_default_dtype() if held is None else held.dtype


def _state_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if args:
        return args[0], args[1:], kwargs
    return kwargs["hidden_states"], (), {k: v for k, v in kwargs.items() if k != "hidden_states"}


@contextmanager
def _forwards(chosen: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules run other functions for a while."""
    held = {module: vars(module).get("forward") for module in chosen}
    try:
        for module, function in chosen.items():
            module.forward = function  # type: ignore[method-assign]
        yield
    finally:
        for module, own in held.items():
            if own is None:
                del module.forward
            else:
                module.forward = own  # type: ignore[method-assign]


@contextmanager
def _empty(modules: list[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Put zeros that take no memory in the place of modules' own parameters for a while."""
    held = [(module, dict(module._parameters)) for module in modules]
    try:
        for module, own in held:
            for name, parameter in own.items():
                if parameter is not None:
                    device = "cpu" if parameter.is_meta else parameter.device
                    zeros: Any = torch.zeros((), dtype=dtype, device=device).expand(parameter.shape)
                    module._parameters[name] = zeros
        yield
    finally:
        for module, own in held:
            module._parameters.update(own)


def find_blocks(network: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the name and the content of a model's list of blocks.

    Raises:
        NoChain: it has none, or several.
    """
    kinds = set(getattr(network, "_no_split_modules", None) or ())
    lists = {name: list(m) for name, m in network.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    found = {name: blocks for name, blocks in lists.items() if all(type(m).__name__ in kinds for m in blocks)}
    if not found:
        count = getattr(getattr(network, "config", None), "num_hidden_layers", None)
        alike = {name: b for name, b in lists.items() if len(b) == count and len({type(m) for m in b}) == 1}
        found = {name: b for name, b in alike.items() if not any(name.startswith(f"{other}.") for other in alike)}
    if len(found) != 1:
        what = f"has {len(found)} lists of blocks ({', '.join(found)})" if found else "has no list of blocks"
        raise NoChain(f"{type(network).__name__} {what}, so its blocks form no chain")
    return next(iter(found.items()))


def outline_of(network: nn.Module, inputs: Mapping[str, Any]) -> Outline:
    """Return how a model's forward goes through its blocks, seen in a run with empty weights.

    Args:
        network: its parameters may be on the meta device.
        inputs: small ones, on the CPU.

    Raises:
        NoChain: the blocks are not called one after the other, each with what the one before gave; which.
    """
    name, blocks = find_blocks(network)
    training = network.training
    network.eval()
    try:
        try:
            return _watched(network, name, blocks, inputs, False)
        except NoChain:
            return _watched(network, name, blocks, inputs, True)
    finally:
        network.train(training)


def _watched(network: nn.Module, name: str, blocks: list[nn.Module], inputs: Mapping[str, Any], in_tuple: bool) -> Outline:
    kind = type(network).__name__
    called: list[nn.Module] = []
    given: list[Tensor] = []
    before: list[nn.Module] = []

    def stub(block: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            state, rest, named = _state_of(args, kwargs)
            if not isinstance(state, Tensor) or state.dim() != 3:
                raise NoChain(f"{kind}: a block takes {type(state).__name__} in the place of hidden states")
            if given and state is not given[-1]:
                raise NoChain(f"{kind} does something between two of its blocks, so they form no chain")
            others = [v for v in (*rest, *named.values()) if isinstance(v, Tensor)]
            if any(v is g for v in others for g in given):
                raise NoChain(f"{kind} hands more than the hidden states from block to block, so they form no chain")
            called.append(block)
            if len(called) == len(blocks):
                raise _Reached(state)
            given.append(torch.zeros_like(state))
            return (given[-1],) if in_tuple else given[-1]

        return forward

    def watch(module: nn.Module, arguments: Any) -> None:
        if called:
            raise NoChain(f"{kind} runs {type(module).__name__} between two of its blocks, so they form no chain")
        if module not in before:
            before.append(module)

    inside = {id(m) for block in blocks for m in block.modules()}
    outside = [m for m in network.modules() if id(m) not in inside and m._parameters]
    handles = [m.register_forward_pre_hook(watch) for m in outside]
    try:
        with torch.no_grad(), _empty(outside, torch.get_default_dtype()), _forwards({b: stub(b) for b in blocks}):
            network(**inputs)
    except _Reached:
        if [id(m) for m in called] != [id(m) for m in blocks]:
            raise NoChain(f"{kind} does not call its blocks in the order of their list") from None
        return Outline(network, name, blocks, before, in_tuple)
    except NoChain:
        raise
    except Exception as error:
        raise NoChain(f"{kind} cannot be run without its weights ({type(error).__name__}: {error})") from error
    finally:
        for handle in handles:
            handle.remove()
    raise NoChain(f"{kind} called {len(called)} of its {len(blocks)} blocks")


__all__ = ["Call", "NoChain", "Outline", "find_blocks", "outline_of"]
