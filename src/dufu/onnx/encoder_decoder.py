"""An encoder-decoder model as three ONNX graphs: the encoder, the decoder's first step, and its later ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dufu.layers.attention import KeyValueCache
from dufu.models.chain import Batch
from dufu.models.encdec import EncoderDecoder
from dufu.onnx.graph import BATCH, Axes, Graph, Trial, made_up_cache, made_up_ids, made_up_masks

SOURCE, TARGET, PAST = "encoder_sequence_length", "decoder_sequence_length", "past_decoder_sequence_length"
SIDES = ("decoder", "encoder")  # whose keys and values are kept: the decoder's own, and those of what it reads
MODEST = 1 << 10  # tokens that a model without limit is tried with


def kept_names(layers: int, sides: tuple[str, ...] = SIDES) -> list[str]:
    """Return the names of what is kept, layer by layer."""
    return [f"{layer}.{side}.{kind}" for layer in range(layers) for side in sides for kind in ("key", "value")]


def caches_of(kept: list[Tensor]) -> tuple[list[KeyValueCache], list[KeyValueCache]]:
    """Return the decoder's own caches and those of what it reads."""
    own = [KeyValueCache(keys, values) for keys, values in zip(kept[0::4], kept[1::4])]
    return own, [KeyValueCache(keys, values) for keys, values in zip(kept[2::4], kept[3::4])]


class SideGraph(Graph):
    """What the three graphs share.

    Args:
        model: in evaluation mode, whole, in float32.
    """

    model: EncoderDecoder
    prefix = "decoder."  # of the units that the graph holds

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__(model)
        self.vocabulary: int = model.head.logits.vocab_size  # type: ignore[assignment,union-attr]
        self.longest = model.longest or MODEST
        attention: Any = [unit.block.attention for unit in model.decoder.layers]  # type: ignore[union-attr]
        self.shapes = [(int(each.kv_heads), int(each.head_size)) for each in attention]
        self.width = int(model.decoder.embedding.word.embedding_dim)

    def units(self) -> list[nn.Module]:
        """Return the units that the graph holds, in order."""
        chosen = self.model.units().items()
        return [unit for name, unit in chosen if name.startswith(self.prefix) or (self.prefix == "decoder." and name == "head")]

    def run(self, batch: Batch, state: Any) -> Tensor:
        """Run the graph's units."""
        batch = self.model.prepare(batch)
        for unit in self.units():
            state = unit(state, batch)
        found: Tensor = state
        return found

    def _present(self, caches: list[KeyValueCache]) -> list[Tensor]:
        tensors: list[Tensor] = []
        for cache in caches:
            assert cache.keys is not None and cache.values is not None
            tensors += [cache.keys, cache.values]
        return tensors

    def _axes(self, start: str, sides: tuple[str, ...], length: str) -> dict[str, Axes]:
        names = kept_names(len(self.shapes), sides)
        return {f"{start}.{name}": {0: BATCH, 2: length if ".decoder." in name else SOURCE} for name in names}


class SourceGraph(SideGraph):
    """The encoder: input_ids and attention_mask (B, S) → last_hidden_state (B, S, H)."""

    file, prefix = "encoder_model.onnx", "encoder."

    def inputs(self) -> dict[str, Axes]:
        """See Graph."""
        return {name: {0: BATCH, 1: SOURCE} for name in ("input_ids", "attention_mask")}

    def outputs(self) -> dict[str, Axes]:
        """See Graph."""
        return {"last_hidden_state": {0: BATCH, 1: SOURCE}}

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """See Graph."""
        input_ids, attention_mask = tensors
        nothing = Batch(input_ids[:, :1])  # the decoder's part, of which nothing is run
        return [self.run(Batch(input_ids, padding=attention_mask.bool(), decoder=nothing), None)]

    def _trial(self, batch: int, length: int, kind: str) -> Trial:
        tensors = [made_up_ids(batch, length, self.vocabulary), made_up_masks(batch, length)[kind]]
        return Trial(f"{batch} × {length} tokens, {kind}", tensors)

    def traced(self) -> Trial:
        """See Graph."""
        return self._trial(2, 3, "all tokens")

    def trials(self) -> Iterator[Trial]:
        """See Graph."""
        for batch, length in ((1, 1), (3, 7), (1, 33)):
            yield self._trial(batch, min(length, self.longest), "all tokens")
        for kind in ("padding on the left", "padding on the right", "holes"):
            yield self._trial(2, min(5, self.longest), kind)


class FirstStepGraph(SideGraph):
    """The decoder without a cache: encoder_attention_mask (B, S), input_ids (B, T), encoder_hidden_states (B, S, H) → logits and caches."""

    file = "decoder_model.onnx"

    def inputs(self) -> dict[str, Axes]:
        """See Graph."""
        source = {0: BATCH, 1: SOURCE}
        return {"encoder_attention_mask": source, "input_ids": {0: BATCH, 1: TARGET}, "encoder_hidden_states": source}

    def outputs(self) -> dict[str, Axes]:
        """See Graph."""
        return {"logits": {0: BATCH, 1: TARGET}, **self._axes("present", SIDES, TARGET)}

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """See Graph."""
        mask, input_ids, memory = tensors
        own, read = self.model.new_caches(), self.model.new_caches()
        # The encoder's tokens themselves are not needed any more; the mask has their shape.
        batch = Batch(mask, padding=mask.bool(), caches=read, decoder=Batch(input_ids, caches=own))
        scores = self.run(batch, memory)
        return [scores, *self._present([cache for pair in zip(own, read) for cache in pair])]

    def _trial(self, batch: int, source: int, target: int, kind: str) -> Trial:
        memory = made_up_cache(batch, 1, source, self.width)[:, 0]
        tensors = [made_up_masks(batch, source)[kind], made_up_ids(batch, target, self.vocabulary), memory]
        return Trial(f"{batch} × {target} tokens after {source}, {kind}", tensors)

    def traced(self) -> Trial:
        """See Graph."""
        return self._trial(2, 3, 4, "all tokens")

    def trials(self) -> Iterator[Trial]:
        """See Graph."""
        for batch, source, target in ((1, 1, 1), (3, 7, 1), (1, 33, 5)):
            yield self._trial(batch, min(source, self.longest), min(target, self.longest), "all tokens")
        for kind in ("padding on the left", "padding on the right", "holes"):
            yield self._trial(2, min(5, self.longest), min(3, self.longest), kind)


class LaterStepGraph(SideGraph):
    """The decoder with its caches of P tokens: encoder_attention_mask (B, S), input_ids (B, T) and the caches → logits and its own caches.

    What it keeps of the encoder's output does not change, so it is not given back. P may be any number, T too.
    """

    file = "decoder_with_past_model.onnx"

    def inputs(self) -> dict[str, Axes]:
        """See Graph."""
        tokens = {"encoder_attention_mask": {0: BATCH, 1: SOURCE}, "input_ids": {0: BATCH, 1: TARGET}}
        return {**tokens, **self._axes("past_key_values", SIDES, PAST)}

    def outputs(self) -> dict[str, Axes]:
        """See Graph."""
        return {"logits": {0: BATCH, 1: TARGET}, **self._axes("present", SIDES[:1], f"{PAST} + {TARGET}")}

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """See Graph."""
        mask, input_ids, *kept = tensors
        own, read = caches_of(kept)
        past, new = kept[0].shape[2], input_ids.shape[1]
        positions = torch.arange(past, past + new, device=input_ids.device).expand_as(input_ids)
        target = Batch(input_ids, positions=positions, caches=own)
        nothing = torch.zeros(1)  # in the place of what the encoder made
        scores = self.run(Batch(mask, padding=mask.bool(), caches=read, decoder=target, encoded=True), nothing)
        return [scores, *self._present(own)]

    def _trial(self, batch: int, source: int, past: int, new: int, kind: str) -> Trial:
        lengths = (past, past, source, source)
        kept = [made_up_cache(batch, heads, length, size) for heads, size in self.shapes for length in lengths]
        tensors = [made_up_masks(batch, source)[kind], made_up_ids(batch, new, self.vocabulary), *kept]
        return Trial(f"{batch} × {past} + {new} tokens after {source}, {kind}", tensors)

    def traced(self) -> Trial:
        """See Graph."""
        return self._trial(2, 3, 4, 2, "all tokens")

    def trials(self) -> Iterator[Trial]:
        """See Graph."""
        for batch, source, past, new in ((1, 1, 1, 1), (3, 7, 2, 1), (1, 33, 7, 3), (1, 3, 33, 1)):
            if max(source, past + new) <= self.longest:
                yield self._trial(batch, source, past, new, "all tokens")
        for kind in ("padding on the left", "padding on the right", "holes"):
            yield self._trial(2, min(5, self.longest), min(3, self.longest - 1), 1, kind)


def graphs_of(model: EncoderDecoder) -> list[Graph]:
    """Return the graphs in the order in which they are called."""
    return [SourceGraph(model), FirstStepGraph(model), LaterStepGraph(model)]
