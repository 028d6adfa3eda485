"""An exported decoder in the place of a model: the same decoding loop, its scores from onnxruntime."""

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
        expected = 3 + 2 * len(self._caches)
        if len(self.session.inputs) != expected or len(self.session.outputs) != expected - 2:
            raise CheckpointError(f"{folder}: the graph and the facts beside it are of different models; export the model again")

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
        for cache, keys, values in zip(batch.caches or (), present[::2], present[1::2]):
            cache.keys, cache.values = keys, values
        return scores[:, -1:] if batch.last_only else scores


@dataclass
class LoadedOnnx:
    """An exported model ready to generate.

    Args:
        model: scores batches.
        tokenizer: the exported one.
        processes: this one alone.
        end_tokens: which end a text; none = the tokenizer's.
    """

    model: OnnxDecoder
    tokenizer: TextTokenizer
    processes: Processes
    end_tokens: tuple[int, ...]


def load_onnx(folder: str | Path, overrides: Sequence[str] = ()) -> LoadedOnnx:
    """Open an exported decoder; nothing of it is loaded into PyTorch.

    Args:
        folder: where `dufu export onnx` wrote it.
        overrides: none; there are no settings.

    Raises:
        ConfigError: onnxruntime is missing, the folder holds no decoder, or there are several processes.
        CheckpointError: a file is missing or damaged.
    """
    folder = Path(folder)
    if overrides:
        raise ConfigError(f"{overrides[0]}: an ONNX graph has no such settings; {folder} runs as it is")
    facts = read_facts(folder)
    if facts.kind != "decoder":
        raise ConfigError(f"{folder}: holds a model of kind {facts.kind}, which does not continue text")
    if world_size() > 1:
        raise ConfigError(f"{folder}: an ONNX graph runs in one process, not in {world_size()}; leave --nproc out")
    settle_threads(1)
    processes = join(ParallelLayout(), torch.device("cpu"))
    return LoadedOnnx(OnnxDecoder(folder, facts), load_tokenizer(folder), processes, tuple(facts.end_tokens))
