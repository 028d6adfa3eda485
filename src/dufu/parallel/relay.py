"""Messages between neighbouring stages of a pipeline: states forward, their gradients backward."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dufu.errors import DufuError
from dufu.parallel.collectives import Communicator, Work
from dufu.parallel.state import Shape, flatten, rebuild

_TENSORS = 64  # tensors of one state, for the tags


@dataclass(frozen=True)
class Form:
    """What a state looks like: its structure, and of each tensor the shape, the type and whether it has a gradient."""

    shape: Shape
    tensors: tuple[tuple[tuple[int, ...], str, bool], ...]

    @staticmethod
    def of(shape: Shape, tensors: list[Tensor]) -> Form:
        """Return the form of a state."""
        return Form(shape, tuple((tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for t in tensors))

    def empty(self, device: torch.device, only_trained: bool = False) -> list[Tensor]:
        """Return tensors to receive into."""
        chosen = [t for t in self.tensors if t[2] or not only_trained]
        return [torch.empty(shape, dtype=getattr(torch, kind), device=device) for shape, kind, _ in chosen]

    def to_json(self) -> str:
        """Return the form as text."""
        return json.dumps([self.shape, self.tensors])

    @staticmethod
    def from_json(text: str) -> Form:
        """Return the form that `to_json` described."""
        shape, tensors = json.loads(text)
        return Form(shape, tuple((tuple(size), kind, trained) for size, kind, trained in tensors))


class Receipt:
    """Tensors on their way; `take` waits for them."""

    def __init__(self, tensors: list[Tensor], works: list[Work]) -> None:
        self._tensors, self._works = tensors, works

    def take(self) -> list[Tensor]:
        """Return the tensors."""
        for work in self._works:
            work.wait()
        return self._tensors


class Relay:
    """Sends to and receives from the pipeline's other processes.

    The form of a state is sent ahead of it the first time that a batch of some shape comes by; afterwards both sides know it.

    Args:
        pipeline: its processes.
        stages: of the pipeline.
        device: where tensors are received.
    """

    def __init__(self, pipeline: Communicator, stages: int, device: torch.device) -> None:
        self.pipeline, self.stages, self.device = pipeline, stages, device
        self._forms: dict[tuple[int, tuple[Any, ...]], Form] = {}

    def _tag(self, stage: int, micro: int, backward: bool) -> int:
        return ((micro * self.stages + stage) * 2 + backward) * _TENSORS

    def send_state(self, state: Any, stage: int, micro: int, to: int, key: tuple[Any, ...]) -> list[Work]:
        """Send what a stage gives to the process of the next one.

        Args:
            key: what the state's form depends on: equal keys, equal forms.

        Raises:
            DufuError: a state of another form under the same key.
        """
        shape, tensors = flatten(state, f"stage {stage} of the pipeline")
        if len(tensors) > _TENSORS:
            raise DufuError(f"stage {stage} of the pipeline hands on {len(tensors)} tensors; at most {_TENSORS}")
        form, known, tag = Form.of(shape, tensors), self._forms.get((stage, key)), self._tag(stage, micro, False)
        works: list[Work] = []
        if known is None:
            self._forms[stage, key] = form
            text = torch.frombuffer(bytearray(form.to_json().encode()), dtype=torch.uint8).to(self.device)
            works += [
                self.pipeline.send(torch.tensor([len(text)], device=self.device), to, tag),
                self.pipeline.send(text, to, tag + 1),
            ]
        elif known != form:
            raise DufuError(
                f"stage {stage} of the pipeline hands on {form.tensors} where it handed on {known.tensors} for a batch of the same shape; "
                f"what passes between stages may depend on the batch's shape only"
            )
        return works + [self.pipeline.send(t.detach().contiguous(), to, tag + i) for i, t in enumerate(tensors)]

    def receive_state(self, stage: int, micro: int, source: int, key: tuple[Any, ...]) -> tuple[Form, Receipt]:
        """Begin to receive what the stage before `stage` gives."""
        before, tag = stage - 1, self._tag(stage - 1, micro, False)
        form = self._forms.get((before, key))
        if form is None:
            length = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.pipeline.receive(length, source, tag).wait()
            text = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
            self.pipeline.receive(text, source, tag + 1).wait()
            form = Form.from_json(bytes(text.cpu().numpy()).decode())
            self._forms[before, key] = form
        tensors = form.empty(self.device)
        return form, Receipt(tensors, [self.pipeline.receive(t, source, tag + i) for i, t in enumerate(tensors)])

    def send_gradients(self, grads: list[Tensor], stage: int, micro: int, to: int) -> list[Work]:
        """Send the gradients of a stage's input to the process of the stage before."""
        tag = self._tag(stage, micro, True)
        return [self.pipeline.send(g.contiguous(), to, tag + i) for i, g in enumerate(grads)]

    def receive_gradients(self, outputs: list[Tensor], stage: int, micro: int, source: int) -> Receipt:
        """Begin to receive the gradients of a stage's outputs, those that have one."""
        tag = self._tag(stage + 1, micro, True)
        grads = [torch.empty_like(o, memory_format=torch.contiguous_format) for o in outputs if o.requires_grad]
        return Receipt(grads, [self.pipeline.receive(g, source, tag + i) for i, g in enumerate(grads)])

    def share(self, result: Any, source: int, key: tuple[Any, ...]) -> Any:
        """Return on every process of the pipeline what `source` has."""
        shape, tensors = flatten(result, "the last unit")
        form = self._forms.get((self.stages, key))
        if form is None:
            mine = Form.of(shape, tensors).to_json()
            form = self._forms[self.stages, key] = Form.from_json(self.pipeline.objects(mine)[source])
        mine_is_it = self.pipeline.rank == source
        out = [t.detach().contiguous() for t in tensors] if mine_is_it else form.empty(self.device)
        for tensor in out:
            self.pipeline.broadcast_(tensor, source)
        return rebuild(form.shape, out)


def rebuild_input(form: Form, tensors: list[Tensor]) -> Any:
    """Return a received state, whose tensors are leaves of this process's graph."""
    for tensor, (_, _, trained) in zip(tensors, form.tensors):
        tensor.requires_grad_(trained)
    return rebuild(form.shape, tensors)
