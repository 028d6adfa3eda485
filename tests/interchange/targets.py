"""What processes run for tests of folders; nothing here imports transformers, which takes seconds in each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dufu.data.indexed import IndexedTokens
from dufu.data.tokenizer import TextTokenizer
from dufu.models import Batch


class Judged:
    """The first tokens of each document, and whether it is an even one."""

    def __init__(
        self,
        source: IndexedTokens,
        tokenizer: TextTokenizer,
        first_document: int,
        last_document: int,
        sequence_length: int | None = 16,
    ) -> None:
        self.source, self.first, self.count = source, first_document, last_document - first_document
        self.words = tokenizer.vocab_size
        self.length = min(16, sequence_length or 16)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = self.source.document_start(self.first + index)
        ids = np.zeros(self.length, dtype=np.int64)
        found = self.source.read(start, min(start + self.length, self.source.document_start(self.first + index + 1)), self.words)
        ids[: len(found)] = found
        return {"input_ids": ids, "sentence_labels": np.int64(index % 2)}


SHORT = [
    "train.train_iter=3", "train.log_period=1", "train.global_batch_size=4", "train.evaluation.enabled=false",
    "train.tensorboard=false",
]  # fmt: skip


def scores(folder: str, overrides: list[str], ids: list[list[int]]) -> tuple[Tensor, list[tuple[str, tuple[int, ...]]]]:
    """Return the scores that a folder gives in a layout, and what this process holds of each weight."""
    from dufu.training.load import load

    loaded = load(folder, overrides)
    with torch.no_grad():
        found = loaded.distributed.runner.forward_everywhere(Batch(torch.tensor(ids)))
    store = loaded.distributed.store
    held = [(i.info.name, i.region.numel) for entry in (*store.entries, *store.frozen) for i in entry.pieces]
    return found, held


def generated(folder: str, overrides: list[str], prompts: list[str]) -> list[list[int]]:
    from dufu.generation.pipeline import TextGenerationPipeline

    return [each.tokens for each in TextGenerationPipeline(folder, overrides)(prompts, max_new_tokens=6)]


def trained(folder: str, corpus: str, out: str, overrides: list[str]) -> None:
    from dufu.config.instantiate import trust
    from dufu.training.run import train

    trust("tests")
    train("gpt2_tiny", [f"model={folder}", *SHORT, f"train.output_dir={out}", *overrides], data=[corpus])


def hidden_states(folder: str, overrides: list[str], ids: list[list[int]], real: list[list[int]]) -> Tensor:
    from dufu.training.load import load

    loaded = load(folder, overrides)
    with torch.no_grad():
        found: Tensor = loaded.distributed.runner.forward_everywhere(Batch(torch.tensor(ids), padding=torch.tensor(real).bool()))
    return found
