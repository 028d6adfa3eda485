"""Samples for BERT: `[CLS] A [SEP] B [SEP]` with hidden words and a question on the pair, each text token once an epoch."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

import numpy as np
import numpy.typing as npt

from dufu.config.registry import register_dataset
from dufu.data.indexed import IndexedTokens
from dufu.data.masking import IGNORE, Draws, Flags, Masker, Tokens
from dufu.data.permutation import permute, unpermute
from dufu.data.sample_map import Rows, open_map
from dufu.data.tokenizer import TextTokenizer
from dufu.data.windows import windows
from dufu.data.words import WordMarker
from dufu.errors import ConfigError, DataError

Sample = dict[str, npt.NDArray[np.generic]]
Segment = tuple[Tokens, Flags]  # tokens, and which of them continue a word

_FORMAT = 1  # raised when the same tokens and options would give another map
_PAIRING = 0x5EED_0F_9A185  # sets the draws for pairs of samples apart from those of single ones


@register_dataset("masked_lm")
class BertDataset:
    """Stretches of a document, in two segments, some of their words hidden anew each epoch.

    The stretches and the question on them, by `sentence_pairs`:

    - "order" (ALBERT): a stretch is cut in two, at the end of one of its sequences, or of a word where it lies in a single one; in half the
      samples the parts change places. `sentence_labels` is 1 where they did.
    - "next" (BERT): the halves of a stretch; half of the samples are paired up, and two of a pair from different documents exchange their
      second halves. `sentence_labels` is 1 where B comes from elsewhere. No text is lost or repeated by it.
    - "none" (RoBERTa): one segment, `[CLS] A [SEP]`; nothing is asked.

    Documents are cut into stretches of nearly equal length, so a short one arises only from a short document; it is padded. A stretch of
    one token has no B, and `sentence_labels` is then IGNORE. An end-of-document token is no text and is left out. Everything random is a
    function of (seed, epoch, sample).

    Args:
        source: tokens. Documents of several sequences (`dufu preprocess --split-sentences`) are cut at sentence ends.
        tokenizer: gives the special tokens and the words.
        first_document, last_document: the split, as a half-open range of documents.
        sequence_length: tokens of a sample, special ones included; None in a config = the model's max_seq_length.
        sentence_pairs: "order", "next" or "none".
        mask_probability: share of the text's tokens to predict.
        max_predictions: most tokens to predict in a sample; None = no other limit.
        max_ngrams: longest run of words hidden together; runs of n have the weight 1/n.
        whole_words: hide all tokens of a word or none.
        chinese_wwm: Chinese words are whole words (jieba); otherwise each character is one.
        seed: of all draws.
        cache_dir: where the map of the stretches is kept; None = the user's cache folder.

    Raises:
        ConfigError: an option is out of range, the tokenizer lacks a special token, or jieba is missing.
        DataError: the split holds no text, or only one document where "next" needs two.
    """

    def __init__(
        self,
        source: IndexedTokens,
        tokenizer: TextTokenizer,
        first_document: int,
        last_document: int,
        sequence_length: int | None = 512,
        sentence_pairs: Literal["order", "next", "none"] = "order",
        mask_probability: float = 0.15,
        max_predictions: int | None = None,
        max_ngrams: int = 3,
        whole_words: bool = True,
        chinese_wwm: bool = False,
        seed: int = 1234,
        cache_dir: str | None = None,
    ) -> None:
        if sequence_length is None or sequence_length < 5:
            raise ConfigError(f"dataloader.dataset.sequence_length={sequence_length}: at least 5")
        if sentence_pairs not in ("order", "next", "none"):
            raise ConfigError(f'dataloader.dataset.sentence_pairs="{sentence_pairs}": one of order, next, none')
        if chinese_wwm and not whole_words:
            raise ConfigError("tokenization.chinese_wwm=true hides Chinese words whole, but dataloader.dataset.whole_words=false")
        self.source, self.tokenizer, self.length, self.pairs, self.seed = source, tokenizer, sequence_length, sentence_pairs, seed
        self.masker = Masker(tokenizer, mask_probability, max_predictions, max_ngrams)
        self.marker = WordMarker(tokenizer, chinese_wwm) if whole_words else None
        self.pad = tokenizer.special("pad") if tokenizer.has("pad") else 0
        self._cls, self._sep = np.array([tokenizer.special("cls")]), np.array([tokenizer.special("sep")])
        self._marks = np.array([tokenizer.special(role) for role in ("cls", "sep", "mask", "pad", "eod") if tokenizer.has(role)])
        halves = sentence_pairs == "next"
        limit = {"order": sequence_length - 3, "next": (sequence_length - 3) // 2, "none": sequence_length - 2}[sentence_pairs]
        end = tokenizer.eod
        described = [_FORMAT, source.fingerprint, first_document, last_document, limit, end, halves]
        self.rows: Rows = open_map(
            described, 3 if halves else 2, lambda: windows(source, first_document, last_document, limit, end, halves), cache_dir
        )
        where = f"{source.prefix}: documents {first_document} to {last_document}"
        if not len(self.rows):
            raise DataError(f"{where} hold no text")
        if halves and last_document - first_document < 2:
            raise DataError(f'{where}: sentence_pairs="next" needs at least 2 documents; choose "order"')
        options = [mask_probability, max_predictions, max_ngrams, whole_words, chinese_wwm, sentence_pairs, sequence_length, seed]
        text = json.dumps([described, options, tokenizer.fingerprint])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._number = int(hashlib.sha256(f"{source.fingerprint} {first_document}".encode()).hexdigest()[:16], 16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.item(index, 0)

    def item(self, index: int, epoch: int) -> Sample:
        """Return input_ids, labels, padding, token_types, each (sequence_length,), and sentence_labels ()."""
        draws = Draws(self.seed, self._number, epoch, index)
        segments, answer = {"order": self._ordered, "next": self._followed, "none": self._single}[self.pairs](index, epoch, draws)
        parts: list[npt.NDArray[np.integer]] = [self._cls]
        flags: list[Flags] = [np.zeros(1, bool)]
        kinds = [0]
        for number, (tokens, continues) in enumerate(segments):
            parts += [tokens, self._sep]
            flags += [continues, np.zeros(1, bool)]
            kinds += [number] * (len(tokens) + 1)
        tokens = np.concatenate(parts)
        inputs, labels = self.masker(tokens, ~np.isin(tokens, self._marks), np.concatenate(flags), draws)
        size = len(tokens)
        sample = {
            "input_ids": np.full(self.length, self.pad, np.int64),
            "labels": np.full(self.length, IGNORE, np.int64),
            "padding": np.arange(self.length) < size,
            "token_types": np.zeros(self.length, np.int64),
            "sentence_labels": np.array(answer, np.int64),
        }
        sample["input_ids"][:size], sample["labels"][:size], sample["token_types"][:size] = inputs, labels, kinds
        return sample

    def _read(self, start: int, stop: int) -> Segment:
        tokens = self.source.read(start, stop, self.tokenizer.vocab_size)
        return tokens, self.marker.continuations(tokens) if self.marker else np.zeros(len(tokens), bool)

    def _single(self, index: int, epoch: int, draws: Draws) -> tuple[list[Segment], int]:
        start, stop = self.rows[index].tolist()
        return [self._read(start, stop)], IGNORE

    def _ordered(self, index: int, epoch: int, draws: Draws) -> tuple[list[Segment], int]:
        """Cut the stretch at a random place, and let the parts change places in half of the samples."""
        start, stop = self.rows[index].tolist()
        tokens, continues = self._read(start, stop)
        if len(tokens) < 2:
            return [(tokens, continues)], IGNORE
        inner_first, inner_last = self.source.sequence_of(np.array([start, stop - 1])).tolist()
        if inner_first < inner_last:
            cuts = self.source.sequence_starts(inner_first + 1, inner_last) - start
        else:
            cuts = np.flatnonzero(~continues[1:]) + 1
        if not len(cuts):
            cuts = np.arange(1, len(tokens))
        cut = int(cuts[draws.below(len(cuts))])
        continues[cut] = False
        parts = [(tokens[:cut], continues[:cut]), (tokens[cut:], continues[cut:])]
        swapped = draws.below(2)
        return parts[::-1] if swapped else parts, swapped

    def _followed(self, index: int, epoch: int, draws: Draws) -> tuple[list[Segment], int]:
        """Take the two halves, or the second half of the sample with which this one forms a pair this epoch."""
        start, cut, stop = self.rows[index].tolist()
        if cut == stop:
            return [self._read(start, stop)], IGNORE
        size, seed = len(self), self.seed ^ _PAIRING
        place = int(permute(np.array([index]), size, seed, epoch)[0])
        other_place = place ^ 1
        if other_place < size and Draws(self.seed, self._number ^ _PAIRING, epoch, place // 2).below(2):
            other = int(unpermute(np.array([other_place]), size, seed, epoch)[0])
            other_start, other_cut, other_stop = self.rows[other].tolist()
            mine, theirs = self.source.document_of(np.array([start, other_start])).tolist()
            if mine != theirs and other_cut < other_stop:
                return [self._read(start, cut), self._read(other_cut, other_stop)], 1
        return [self._read(start, cut), self._read(cut, stop)], 0
