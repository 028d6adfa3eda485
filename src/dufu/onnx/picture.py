"""A model of pictures as one ONNX graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dufu.models.chain import Batch, ChainModel
from dufu.models.pictures import PIXELS
from dufu.onnx.graph import BATCH, Axes, Graph, Trial


class PictureGraph(Graph):
    """pixel_values (B, colours, height, width) → scores of classes (B, C), or hidden states (B, T, H) and the pooled class token (B, H).

    The size of a picture is the model's; B is free.
    """

    model: ChainModel

    def __init__(self, model: ChainModel) -> None:
        super().__init__(model)
        embedding: Any = model.embedding
        self.tokens = int(getattr(embedding, "tokens", embedding.patch.num_patches))
        self.side, self.colours = int(model.img_size), int(embedding.patch.weight.shape[1])  # type: ignore[arg-type]
        with torch.no_grad():
            found = self.model(self._batch(torch.zeros(1, self.colours, self.side, self.side)))
        self.pools, self.classifies = isinstance(found, dict), isinstance(found, Tensor) and found.dim() == 2

    def _batch(self, pixels: Tensor) -> Batch:
        return Batch(torch.zeros(pixels.shape[0], self.tokens, dtype=torch.int64), extra={PIXELS: pixels})

    def inputs(self) -> dict[str, Axes]:
        """See Graph."""
        return {"pixel_values": {0: BATCH}}

    def outputs(self) -> dict[str, Axes]:
        """See Graph."""
        names = ["logits"] if self.classifies else ["last_hidden_state", *(["pooler_output"] if self.pools else [])]
        return {name: {0: BATCH} for name in names}

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """See Graph."""
        found = self.model(self._batch(tensors[0]))
        return list(found.values()) if self.pools else [found]

    def _trial(self, batch: int) -> Trial:
        count = batch * self.colours * self.side * self.side
        pixels = torch.arange(count, dtype=torch.float32).mul(0.37).sin().view(batch, self.colours, self.side, self.side)
        return Trial(f"{batch} pictures", [pixels])

    def traced(self) -> Trial:
        """See Graph."""
        return self._trial(2)

    def trials(self) -> Iterator[Trial]:
        """See Graph."""
        for batch in (1, 3):
            yield self._trial(batch)
