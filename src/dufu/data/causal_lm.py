"""Samples for causal language modelling: windows over the documents of a split, one after another."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

import numpy as np
import numpy.typing as npt

from dufu.config.registry import register_dataset
from dufu.data.indexed import IndexedTokens
from dufu.data.masking import IGNORE
from dufu.data.tokenizer import TextTokenizer
from dufu.errors import ConfigError, DataError

Sample = dict[str, npt.NDArray[np.int64]]


@register_dataset("causal_lm")
class CausalLMDataset:
    """Windows of `sequence_length` tokens and, shifted by one, their labels. Each token is a label once an epoch.

    The last window of a split may be short; nothing is dropped and nothing is seen twice.

    Args:
        source: tokens.
        tokenizer: gives the pad token and the size of the vocabulary.
        first_document, last_document: the split, as a half-open range of documents.
        sequence_length: tokens of a sample; None in a config = the model's max_seq_length.
        documents: "join" lets attention cross document boundaries, as GPT-2 was trained; "isolate" keeps documents apart: attention
            stays inside, positions begin at 0, and no label crosses.
    """

    def __init__(
        self,
        source: IndexedTokens,
        tokenizer: TextTokenizer,
        first_document: int,
        last_document: int,
        sequence_length: int | None = 1024,
        documents: Literal["join", "isolate"] = "join",
    ) -> None:
        if sequence_length is None or sequence_length < 1:
            raise ConfigError(f"dataloader.dataset.sequence_length={sequence_length}: at least 1")
        if documents not in ("join", "isolate"):
            raise ConfigError(f'dataloader.dataset.documents="{documents}": "join" or "isolate"')
        self.source, self.length, self.documents = source, sequence_length, documents
        self.vocab_size = tokenizer.vocab_size
        self.pad = tokenizer.special("pad") if tokenizer.has("pad") else 0
        self.start = source.document_start(first_document)
        self.stop = source.document_start(last_document)
        if self.stop - self.start < 2:
            raise DataError(
                f"{source.prefix}: documents {first_document} to {last_document} hold {self.stop - self.start} tokens; "
                f"a sample needs at least 2"
            )
        described = [source.fingerprint, first_document, last_document, sequence_length, documents, self.pad, tokenizer.fingerprint]
        self.fingerprint = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return -(-(self.stop - self.start - 1) // self.length)

    def __getitem__(self, index: int) -> Sample:
        """Return input_ids, labels, and with "isolate" positions and documents, each (sequence_length,)."""
        start = self.start + index * self.length
        tokens = self.source.read(start, min(start + self.length + 1, self.stop), self.vocab_size)
        real = len(tokens) - 1
        inputs = np.full(self.length, self.pad, np.int64)
        labels = np.full(self.length, IGNORE, np.int64)
        inputs[:real], labels[:real] = tokens[:-1], tokens[1:]
        sample = {"input_ids": inputs, "labels": labels}
        if self.documents == "isolate":
            owner = self.source.document_of(np.arange(start, start + real + 1))
            numbers = np.full(self.length, -1, np.int64)
            numbers[:real] = owner[:-1] - owner[0]
            labels[:real][owner[1:] != owner[:-1]] = IGNORE
            places = np.arange(self.length)
            # Padding (-1) is a document of its own, so that it attends to itself alone.
            begins = np.zeros(self.length, np.int64)
            begins[1:] = np.where(numbers[1:] != numbers[:-1], places[1:], 0)
            sample["positions"] = places - np.maximum.accumulate(begins)
            sample["documents"] = numbers
        return sample
