"""A decoder-only model as one ONNX graph: it serves the first step and every later one, with any number of new tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dufu.layers.attention import KeyValueCache
from dufu.models.chain import Batch, ChainModel
from dufu.onnx.graph import BATCH, LENGTH, PAST, TOTAL, Axes, Graph, Trial, made_up_cache, made_up_ids, made_up_masks


def cache_shapes(model: ChainModel) -> list[tuple[int, int]]:
    """Return each layer's key-value heads and head size, as the model itself makes them."""
    caches = model.new_caches()
    with torch.no_grad():
        model(Batch(torch.zeros(1, 1, dtype=torch.int64), caches=caches))
    shapes = []
    for cache in caches:
        assert cache.keys is not None
        shapes.append((cache.keys.shape[1], cache.keys.shape[3]))
    return shapes


def cache_names(layers: int) -> list[str]:
    """Return the names of what is kept of each layer, `N.key` and `N.value` by turns."""
    return [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]


class DecoderGraph(Graph):
    """input_ids (B, T), attention_mask (B, P + T), position_ids (B, T) and the cache of P tokens → logits (B, T, V) and the new cache.

    P may be 0. The mask is 1 where a token is real; a token that is none needs a position too, which may be any.
    """

    model: ChainModel

    def __init__(self, model: ChainModel) -> None:
        super().__init__(model)
        self.shapes = cache_shapes(model)
        self.vocabulary, self.longest = int(model.vocab_size), int(model.max_seq_length)  # type: ignore[arg-type]

    def inputs(self) -> dict[str, Axes]:
        """See Graph."""
        tokens = {"input_ids": {0: BATCH, 1: LENGTH}, "attention_mask": {0: BATCH, 1: TOTAL}, "position_ids": {0: BATCH, 1: LENGTH}}
        return {**tokens, **{f"past_key_values.{name}": {0: BATCH, 2: PAST} for name in cache_names(len(self.shapes))}}

    def outputs(self) -> dict[str, Axes]:
        """See Graph."""
        present = {f"present.{name}": {0: BATCH, 2: TOTAL} for name in cache_names(len(self.shapes))}
        return {"logits": {0: BATCH, 1: LENGTH}, **present}

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """See Graph."""
        input_ids, attention_mask, position_ids, *past = tensors
        caches = [KeyValueCache(keys, values) for keys, values in zip(past[::2], past[1::2])]
        batch = Batch(input_ids, positions=position_ids, padding=attention_mask.bool(), caches=caches)
        scores: Tensor = self.model(batch)
        present: list[Tensor] = []
        for cache in caches:
            assert cache.keys is not None and cache.values is not None
            present += [cache.keys, cache.values]
        return [scores, *present]

    @property
    def window(self) -> int:
        """Return the widest sliding window that a text may outgrow; 0 where there is none."""
        return max((w for w in getattr(self.model, "windows", ()) if w < self.longest), default=0)

    def traced(self) -> Trial:
        """See Graph. With sliding windows the text is longer than any of them, since a shorter one needs no window."""
        return self._trial(2, max(4, self.window + 2), 2, "all tokens", made_up=True)

    def _trial(self, batch: int, past: int, new: int, kind: str, made_up: bool = False) -> Trial:
        mask = made_up_masks(batch, past + new)[kind]
        ids = made_up_ids(batch, past + new, self.vocabulary)
        positions = (mask.cumsum(1) - 1).clamp(0, self.longest - 1)
        kept = [made_up_cache(batch, heads, past if made_up else 0, size) for heads, size in self.shapes for _ in range(2)]
        if past and not made_up:  # what PyTorch keeps of the first tokens
            with torch.no_grad():
                kept = self([ids[:, :past], mask[:, :past], positions[:, :past], *kept])[1:]
        tensors = [ids[:, past:].contiguous(), mask, positions[:, past:].contiguous(), *kept]
        return Trial(f"{batch} × {past} + {new} tokens, {kind}", tensors)

    def trials(self) -> Iterator[Trial]:
        """See Graph: with and without a cache, one and several new tokens, every kind of mask."""
        longest = self.longest
        sizes = [(2, 4, 2), (1, 0, 1), (1, 1, 1), (3, 0, 5), (3, 7, 3), (1, min(33, longest - 1), 1)]
        for batch, past, new in dict.fromkeys(s for s in sizes if s[1] >= 0 and s[1] + s[2] <= longest):
            yield self._trial(batch, past, new, "all tokens")
        for kind in ("padding on the left", "padding on the right", "holes"):
            yield self._trial(2, 0, min(5, longest), kind)
            yield self._trial(3, min(4, longest - 1), 1, kind)
        if self.window:
            for new in (1, 3):
                yield self._trial(1, self.window, new, "all tokens", made_up=True)
