"""Exported graphs in the place of a model: the same decoding loops, their scores from onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dufu.data.tokenizer import TextTokenizer, load_tokenizer
from dufu.errors import CheckpointError, ConfigError
from dufu.layers.attention import KeyValueCache
from dufu.models.chain import Batch, ChainModel
from dufu.onnx.facts import Facts, read_facts
from dufu.onnx.session import Session
from dufu.parallel.layout import ParallelLayout
from dufu.parallel.process import Processes, join, settle_threads, world_size


class OnnxDecoder(ChainModel):
    """A decoder-only model whose weights lie in an ONNX graph; as a module it has none.

    Args:
        folder: where the graph lies.
        facts: of the folder.
    """

    def __init__(self, folder: Path, facts: Facts) -> None:
        super().__init__()
        self.session = Session(folder / facts.graphs[0])
        self.vocab_size, self.max_seq_length = facts.vocab_size, facts.max_seq_length
        self._caches = [(heads, size) for heads, size in facts.caches]
        _check(folder, self.session, 3 + 2 * len(self._caches), 1 + 2 * len(self._caches))

    def new_caches(self) -> list[KeyValueCache]:
        """See ChainModel."""
        return [KeyValueCache() for _ in self._caches]

    def forward(self, batch: Batch) -> Tensor:
        """Return the scores (B, T or 1, V) and keep what the graph keeps."""
        rows, new = batch.input_ids.shape
        past: list[Tensor] = []
        for (heads, size), cache in zip(self._caches, batch.caches or self.new_caches(), strict=True):
            for kept in (cache.keys, cache.values):
                past.append(torch.zeros(rows, heads, 0, size) if kept is None else kept)
        total = new + past[0].shape[2]
        mask = torch.ones(rows, total, dtype=torch.int64) if batch.padding is None else batch.padding.long()
        positions = torch.arange(total - new, total).expand(rows, new) if batch.positions is None else batch.positions
        wanted = None if batch.caches else ["logits"]
        scores, *present = self.session([batch.input_ids, mask, positions, *past], wanted)
        _fill(batch.caches or [], present[0::2], present[1::2])
        return scores[:, -1:] if batch.last_only else scores


class OnnxEncoderDecoder(ChainModel):
    """An encoder-decoder model whose weights lie in three ONNX graphs; as a module it has none.

    Args:
        folder: where the graphs lie.
        facts: of the folder.
    """

    causal = False
    is_encoder_decoder = True

    def __init__(self, folder: Path, facts: Facts) -> None:
        super().__init__()
        if len(facts.graphs) != 3:
            raise CheckpointError(f"{folder}: names {len(facts.graphs)} graphs instead of 3; export the model again")
        self.encoder, self.first, self.later = (Session(folder / name) for name in facts.graphs)
        self.start_token = None if facts.start_token < 0 else facts.start_token
        self.longest = facts.max_seq_length or None
        self.layers = len(facts.caches)
        _check(folder, self.encoder, 2, 1)
        _check(folder, self.first, 3, 1 + 4 * self.layers)
        _check(folder, self.later, 2 + 4 * self.layers, 1 + 2 * self.layers)

    def new_caches(self) -> list[KeyValueCache]:
        """See ChainModel."""
        return [KeyValueCache() for _ in range(self.layers)]

    def forward(self, batch: Batch) -> Tensor:
        """Return the scores of the decoder's tokens (B, T or 1, V); the encoder runs where the caches hold nothing of it yet."""
        own = batch.decoder
        assert own is not None
        mask = torch.ones_like(batch.input_ids) if batch.padding is None else batch.padding.long()
        if batch.encoded:
            assert own.caches is not None and batch.caches is not None
            scores, *present = self.later([mask, own.input_ids, *_interleaved(own.caches, batch.caches)])
            _fill(own.caches, present[0::2], present[1::2])
        else:
            (memory,) = self.encoder([batch.input_ids, mask])
            scores, *present = self.first([mask, own.input_ids, memory], None if own.caches else ["logits"])
            _fill(own.caches or [], present[0::4], present[1::4])
            _fill(batch.caches or [], present[2::4], present[3::4])
        return scores[:, -1:] if own.last_only else scores


def _check(folder: Path, session: Session, inputs: int, outputs: int) -> None:
    if len(session.inputs) != inputs or len(session.outputs) != outputs:
        raise CheckpointError(f"{folder}: a graph and the facts beside it are of different models; export the model again")


def _interleaved(own: Sequence[KeyValueCache], read: Sequence[KeyValueCache]) -> list[Tensor]:
    kept = [tensor for mine, its in zip(own, read) for tensor in (mine.keys, mine.values, its.keys, its.values)]
    return [tensor for tensor in kept if tensor is not None]


def _fill(caches: Sequence[KeyValueCache], keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for cache, new_keys, new_values in zip(caches, keys, values):
        cache.keys, cache.values = new_keys, new_values


MODELS: dict[str, type[OnnxDecoder | OnnxEncoderDecoder]] = {"decoder": OnnxDecoder, "encoder_decoder": OnnxEncoderDecoder}


@dataclass
class LoadedOnnx:
    """An exported model ready to generate.

    Args:
        model: scores batches.
        tokenizer: the exported one.
        processes: this one alone.
        end_tokens: which end a text; none = the tokenizer's.
        prefix: tokens before a prompt.
    """

    model: OnnxDecoder | OnnxEncoderDecoder
    tokenizer: TextTokenizer
    processes: Processes
    end_tokens: tuple[int, ...]
    prefix: tuple[int, ...]


def load_onnx(folder: str | Path, overrides: Sequence[str] = ()) -> LoadedOnnx:
    """Open exported graphs that write text; nothing of it is loaded into PyTorch.

    Args:
        folder: where `dufu export onnx` wrote it.
        overrides: none; there are no settings.

    Raises:
        ConfigError: onnxruntime is missing, the folder holds graphs of another kind, or there are several processes.
        CheckpointError: a file is missing or damaged.
    """
    folder = Path(folder)
    if overrides:
        raise ConfigError(f"{overrides[0]}: an ONNX graph has no such settings; {folder} runs as it is")
    facts = read_facts(folder)
    if facts.kind not in MODELS:
        raise ConfigError(f"{folder}: holds a model of kind {facts.kind}, which does not continue text")
    if world_size() > 1:
        raise ConfigError(f"{folder}: an ONNX graph runs in one process, not in {world_size()}; leave --nproc out")
    settle_threads(1)
    processes = join(ParallelLayout(), torch.device("cpu"))
    model, tokenizer = MODELS[facts.kind](folder, facts), load_tokenizer(folder)
    return LoadedOnnx(model, tokenizer, processes, tuple(facts.end_tokens), tuple(facts.prefix))
