"""Running the chain of units: whole on this process, or by stages that pass states on to each other.

Both runners offer the training step the same two calls, and the store hears from both when a backward begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dufu.compat import backward_to_inputs, backward_to_weights
from dufu.parallel import faults
from dufu.parallel.collectives import Work
from dufu.parallel.process import Processes
from dufu.parallel.relay import Form, Receipt, Relay, rebuild_input
from dufu.parallel.schedule import Action, received_for_certain, schedule_table
from dufu.parallel.state import flatten, rebuild
from dufu.parallel.store import ParameterStore

Context = Callable[[], AbstractContextManager[Any]]
Loss = Callable[[dict[str, Tensor]], Tensor]


class Runner(Protocol):
    """Runs the model's chain, whatever the layout."""

    has_result: bool  # whether what the chain's last unit gives comes to be on this process

    def train(self, batches: Sequence[Any], context: Context, loss: Loss) -> None:
        """Run forward and backward of a step's micro-batches.

        Args:
            context: entered around every forward.
            loss: makes of the head's sums what backward begins with.
        """

    def forward(self, batch: Any) -> Any:
        """Run the chain forward; return what the last unit gives, or None where `has_result` is false."""

    def forward_everywhere(self, batch: Any) -> Any:
        """Run the chain forward; return what the last unit gives, on every process."""


class WholeChain:
    """The whole chain on this process."""

    has_result = True

    def __init__(self, model: Any, store: ParameterStore) -> None:
        self.model, self.store = model, store

    def train(self, batches: Sequence[Any], context: Context, loss: Loss) -> None:
        """See Runner."""
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            self.store.start_backward(0, last)
            with context():
                sums = self.model(batch)
            loss(sums).backward()
            self.store.end_backward(0, last)

    def forward(self, batch: Any) -> Any:
        """See Runner."""
        return self.model(batch)

    def forward_everywhere(self, batch: Any) -> Any:
        """See Runner."""
        return self.model(batch)


@dataclass
class _Pass:
    """A micro-batch between its forward and its backward in one stage."""

    inputs: list[Tensor]
    outputs: list[Tensor]  # of the last stage: the loss alone


class PipelinedChain:
    """This process's stages of the chain.

    Args:
        model: prepares batches.
        stages: the units of each of this process's stages, by the stage's number.
        store: of this process's parameters.
        processes: of the layout.
        split_backward: whether schedules may run the two parts of a backward at different times; otherwise the whole runs at the first.
    """

    def __init__(
        self, model: Any, stages: dict[int, list[nn.Module]], store: ParameterStore, processes: Processes, split_backward: bool
    ) -> None:
        self.model, self.stages, self.store, self.processes = model, stages, store, processes
        self.layout, self.split_backward = processes.layout, split_backward
        self.last_stage = self.layout.stages - 1
        self.has_result = self.last_stage in stages
        self.relay = Relay(processes.pipeline, self.layout.stages, processes.device)
        self._chunk = {stage: number for number, stage in enumerate(sorted(stages))}
        self._weights: dict[int, list[Tensor]] = {
            stage: [p for p in dict.fromkeys(p for unit in units for p in unit.parameters()) if p.requires_grad]
            for stage, units in stages.items()
        }

    def _run_units(self, stage: int, state: Any, batch: Any) -> Any:
        for unit in self.stages[stage]:
            state = unit(state, batch)
        return state

    def forward(self, batch: Any) -> Any:
        """See Runner. Messages are not waited for, so that one batch follows the other through the pipeline."""
        batch, key = self.model.prepare(batch), _key(batch)
        result: Any = None
        works: list[Work] = []
        handed: Any = None  # from a stage of this process to the next one on it
        for stage in sorted(self.stages):
            state = handed
            if stage and self.layout.stage_owner(stage - 1) != self.processes.pipeline.rank:
                form, receipt = self.relay.receive_state(stage, 0, self.layout.stage_owner(stage - 1), key)
                state = rebuild(form.shape, receipt.take())
            result = handed = self._run_units(stage, state, batch)
            if stage < self.last_stage:
                to = self.layout.stage_owner(stage + 1)
                if to != self.processes.pipeline.rank:
                    works += self.relay.send_state(result, stage, 0, to, key)
        for work in works:
            work.wait()
        return result if self.has_result else None

    def forward_everywhere(self, batch: Any) -> Any:
        """See Runner."""
        return self.relay.share(self.forward(batch), self.layout.stage_owner(self.last_stage), _key(batch))

    def train(self, batches: Sequence[Any], context: Context, loss: Loss) -> None:
        """See Runner."""
        _Step(self, batches, context, loss).run()


class _Step:
    """One step's way through the schedule."""

    def __init__(self, chain: PipelinedChain, batches: Sequence[Any], context: Context, loss: Loss) -> None:
        self.chain, self.context, self.loss = chain, context, loss
        self.batches = [chain.model.prepare(batch) for batch in batches]
        self.keys = [_key(batch) for batch in batches]
        layout, self.me = chain.layout, chain.processes.pipeline.rank
        table = schedule_table(layout.pipelining, layout.pipeline, len(batches))
        self.actions = table[self.me]
        self.free = received_for_certain(table, layout, self.me)
        self.passes: dict[tuple[int, int], _Pass] = {}
        self.pending: dict[tuple[int, int], tuple[list[Tensor], Any]] = {}  # backwards to the weights that are still to run
        self.states: dict[tuple[int, int], tuple[Form, Receipt | list[Tensor]]] = {}  # inputs, come or coming
        self.gradients: dict[tuple[int, int], Receipt | list[Tensor]] = {}  # of outputs, come or coming
        self.ready: dict[Action, Any] = {}  # what is to be sent
        self.sent: dict[Action, list[Work]] = {}
        self.left = dict.fromkeys(chain.stages, len(batches))  # backwards that each stage has still to do

    def run(self) -> None:
        """Do everything in order, and wait until all messages are taken."""
        actions: dict[str, Callable[[Action], None]] = {
            "F": self._forward, "B": self._backward, "I": self._backward, "W": self._backward_to_weights,
            "SEND_F": self._send_state, "RECV_F": self._receive_state,
            "SEND_B": self._send_gradients, "RECV_B": self._receive_gradients,
        }  # fmt: skip
        for action in self.actions:
            actions[action.kind](action)
        for works in self.sent.values():
            for work in works:
                work.wait()

    def _owner(self, stage: int) -> int:
        return self.chain.layout.stage_owner(stage)

    def _came(self, kind: str, stage: int, micro: int) -> None:
        """Give up what the sender of a message must have taken before."""
        for action in self.free.get(Action(kind, stage, micro), ()):
            for work in self.sent.pop(action, ()):
                work.wait()

    def _forward(self, action: Action) -> None:
        _, stage, micro = action
        state, inputs = None, []
        if stage:
            form, coming = self.states.pop((stage, micro))
            inputs = coming if isinstance(coming, list) else coming.take()
            self._came("RECV_F", stage, micro)
            state = rebuild_input(form, inputs)
        with self.context():
            result = self.chain._run_units(stage, state, self.batches[micro])
        if stage == self.chain.last_stage:
            self.passes[stage, micro] = _Pass(inputs, [self.loss(result)])
            return
        shape, outputs = flatten(result, f"stage {stage} of the pipeline")
        self.passes[stage, micro] = _Pass(inputs, outputs)
        if self._owner(stage + 1) == self.me:
            self.states[stage + 1, micro] = Form.of(shape, outputs), [o.detach() for o in outputs]
        else:
            self.ready[Action("SEND_F", stage, micro)] = result

    def _backward(self, action: Action) -> None:
        kind, stage, micro = action
        passed = self.passes.pop((stage, micro))
        outputs = [o for o in passed.outputs if o.requires_grad]
        if stage == self.chain.last_stage:
            grads = [torch.ones_like(o) for o in outputs]
        else:
            coming = self.gradients.pop((stage, micro))
            grads = coming if isinstance(coming, list) else coming.take()
            self._came("RECV_B", stage, micro)
        if faults.active("pipeline.scale_gradients"):
            grads = [g / len(self.batches) for g in grads]
        inputs, weights = [i for i in passed.inputs if i.requires_grad], self.chain._weights[stage]
        if kind == "I" and self.chain.split_backward and inputs and outputs:
            self.pending[stage, micro] = weights, backward_to_inputs(outputs, grads, inputs, weights)
        else:
            self._announce(stage)
            if outputs:
                torch.autograd.backward(outputs, grads)
            self._finished(stage)
        if stage:
            self._hand_back(stage, micro, [torch.zeros_like(i) if i.grad is None else i.grad for i in inputs])
            for tensor in inputs:
                tensor.grad = None

    def _hand_back(self, stage: int, micro: int, grads: list[Tensor]) -> None:
        if self._owner(stage - 1) == self.me:
            self.gradients[stage - 1, micro] = grads
        else:
            self.ready[Action("SEND_B", stage, micro)] = grads

    def _backward_to_weights(self, action: Action) -> None:
        _, stage, micro = action
        if (stage, micro) in self.pending:
            self._announce(stage)
            backward_to_weights(*self.pending.pop((stage, micro)))
            self._finished(stage)

    def _announce(self, stage: int) -> None:
        self.left[stage] -= 1
        self.chain.store.start_backward(self.chain._chunk[stage], self.left[stage] == 0)

    def _finished(self, stage: int) -> None:
        self.chain.store.end_backward(self.chain._chunk[stage], self.left[stage] == 0)

    def _send_state(self, action: Action) -> None:
        _, stage, micro = action
        state = self.ready.pop(action)
        self.sent[action] = self.chain.relay.send_state(state, stage, micro, self._owner(stage + 1), self.keys[micro])

    def _receive_state(self, action: Action) -> None:
        _, stage, micro = action
        self.states[stage, micro] = self.chain.relay.receive_state(stage, micro, self._owner(stage - 1), self.keys[micro])

    def _send_gradients(self, action: Action) -> None:
        _, stage, micro = action
        self.sent[action] = self.chain.relay.send_gradients(self.ready.pop(action), stage, micro, self._owner(stage - 1))

    def _receive_gradients(self, action: Action) -> None:
        _, stage, micro = action
        outputs = self.passes[stage, micro].outputs
        self.gradients[stage, micro] = self.chain.relay.receive_gradients(outputs, stage, micro, self._owner(stage + 1))


def _key(batch: Any) -> tuple[Any, ...]:
    """Return what the form of a state depends on: the shapes of the batch's tensors, and how it is run."""
    shapes: list[Any] = []
    for item in fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, type(batch)):
            shapes.append((item.name, _key(value)))
        elif isinstance(value, Tensor):
            shapes.append((item.name, tuple(value.shape)))
        elif isinstance(value, dict):
            shapes += [(name, tuple(v.shape)) for name, v in value.items() if isinstance(v, Tensor)]
    return (torch.is_grad_enabled(), batch.labels is None, batch.encoded, *shapes)


def chain_of(units: dict[str, nn.Module], stage_of: dict[str, int], mine: list[int]) -> dict[int, list[nn.Module]]:
    """Return the units of each of this process's stages."""
    return {stage: [unit for name, unit in units.items() if stage_of[name] == stage] for stage in mine}


__all__ = ["PipelinedChain", "Runner", "WholeChain", "chain_of"]
