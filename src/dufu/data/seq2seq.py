"""Samples for encoder-decoder models: spans of a text hidden behind sentinels, and what was hidden as the text to write (T5)."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import numpy.typing as npt

from dufu.config.registry import register_dataset
from dufu.data.indexed import IndexedTokens
from dufu.data.masking import IGNORE, Draws, Flags, Tokens
from dufu.data.sample_map import Rows, open_map
from dufu.data.tokenizer import TextTokenizer
from dufu.data.windows import windows
from dufu.errors import ConfigError, DataError

Sample = dict[str, npt.NDArray[np.generic]]

_FORMAT = 1  # raised when the same tokens and options would give another map


def sentinels(tokenizer: TextTokenizer, extra_ids: int) -> Tokens:
    """Return the numbers that stand for hidden spans, first to last.

    Those are the tokenizer's own `<extra_id_0>`, `<extra_id_1>`, … where it has them; otherwise `extra_ids` rows after its vocabulary.
    """
    found: list[int] = []
    while len(found) < 1000:
        names = (f"<extra_id_{len(found)}>", f"▁<extra_id_{len(found)}>")
        numbers = [n for n in map(tokenizer.tokenizer.token_to_id, names) if n is not None]
        if not numbers:
            break
        found.append(int(numbers[0]))
    return np.array(found or range(tokenizer.vocab_size, tokenizer.vocab_size + extra_ids), np.int64)


def start_token(tokenizer: TextTokenizer) -> int:
    """Return what a decoder begins with: the pad token, as T5's does, or the end token where there is none."""
    return tokenizer.special("pad") if tokenizer.has("pad") else tokenizer.eod


class Corruption:
    """How much of n tokens is hidden, in how many spans.

    Args:
        share: of the tokens that are hidden.
        mean_span: tokens of a hidden span on average.
        most_spans: as many as there are sentinels.
    """

    def __init__(self, share: float, mean_span: float, most_spans: int) -> None:
        self.share, self.mean_span, self.most_spans = share, mean_span, most_spans

    def counts(self, size: int) -> tuple[int, int]:
        """Return how many of `size` tokens are hidden, and in how many spans; at least one token, and not all but of a single one."""
        hidden = min(max(1, round(self.share * size)), max(1, size - 1))
        spans = min(max(1, round(hidden / self.mean_span)), self.most_spans, hidden, max(1, size - hidden))
        return hidden, spans

    def lengths(self, size: int) -> tuple[int, int]:
        """Return the tokens of input and target, end tokens included."""
        hidden, spans = self.counts(size)
        return size - hidden + spans + 1, hidden + spans + 1

    def largest(self, inputs: int, targets: int | None) -> int:
        """Return the most tokens of a text whose input, and target where that is limited, fit; 0 where none does."""

        def fits(size: int) -> bool:
            found = self.lengths(size)
            return found[0] <= inputs and (targets is None or found[1] <= targets)

        size = 0
        while fits(size + 1):
            size += 1
        return size

    def __call__(self, size: int, draws: Draws) -> Flags:
        """Return which of `size` tokens are hidden: visible and hidden stretches in turns, a visible one first."""
        hidden, spans = self.counts(size)
        out = np.zeros(size, np.bool_)
        if size == 1:
            return ~out
        of_hidden, of_visible = _cut(hidden, spans, draws), _cut(size - hidden, spans, draws)
        ends = np.cumsum(np.stack([of_visible, of_hidden], 1).reshape(-1))
        for start, stop in zip(ends[::2].tolist(), ends[1::2].tolist()):
            out[start:stop] = True
        return out


def _cut(size: int, parts: int, draws: Draws) -> Tokens:
    """Return the lengths of `parts` stretches, each at least 1, of `size` tokens; every division is equally likely."""
    cuts = np.sort(draws.order(size - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [size]])).astype(np.int64)


@register_dataset("seq2seq")
class Seq2SeqDataset:
    """T5's pre-training (Raffel et al., 2020): each hidden span of a text becomes one sentinel, and the target lists the sentinels, each
    followed by what it stands for. Both end with the end token. What is hidden is drawn anew each epoch.

    Documents are cut into stretches of nearly equal length, as long as their input may be; a short one is padded. Everything random is a
    function of (seed, epoch, sample).

    Args:
        source: tokens.
        tokenizer: gives the special tokens.
        first_document, last_document: the split, as a half-open range of documents.
        sequence_length: tokens of the encoder's input, the end token included; None in a config = the model's max_seq_length.
        target_length: tokens of the target, the end token included; None = as many as the longest needs.
        noise_density: share of the text's tokens that are hidden.
        mean_noise_span_length: tokens of a hidden span on average.
        extra_ids: sentinels after the tokenizer's vocabulary, where it has none of its own; None in a config = the model's extra_ids.
        decoder_start_token_id: what the decoder begins with; None = the model's, or the tokenizer's pad token.
        seed: of all draws.
        cache_dir: where the map of the stretches is kept; None = the user's cache folder.

    Raises:
        ConfigError: an option is out of range, or there are no sentinels.
        DataError: the split holds no text.
    """

    def __init__(
        self,
        source: IndexedTokens,
        tokenizer: TextTokenizer,
        first_document: int,
        last_document: int,
        sequence_length: int | None = 512,
        target_length: int | None = None,
        noise_density: float = 0.15,
        mean_noise_span_length: float = 3.0,
        extra_ids: int | None = None,
        decoder_start_token_id: int | None = None,
        seed: int = 1234,
        cache_dir: str | None = None,
    ) -> None:
        where = "dataloader.dataset"
        if sequence_length is None or sequence_length < 3:
            raise ConfigError(f"{where}.sequence_length={sequence_length}: at least 3")
        if not 0.0 < noise_density < 1.0:
            raise ConfigError(
                f"{where}.noise_density={noise_density}: above 0, below 1; without hidden tokens there is nothing to learn"
            )
        if mean_noise_span_length < 1.0:
            raise ConfigError(f"{where}.mean_noise_span_length={mean_noise_span_length}: at least 1")
        self.sentinels = sentinels(tokenizer, extra_ids or 0)
        if not len(self.sentinels):
            raise ConfigError(
                f"{where}: tokenizer {tokenizer.source} has no <extra_id_0> to stand for hidden spans; set model.cfg.extra_ids=100"
            )
        self.corruption = Corruption(noise_density, mean_noise_span_length, len(self.sentinels))
        limit = self.corruption.largest(sequence_length, target_length)
        if not limit:
            raise ConfigError(f"{where}.target_length={target_length}: no text fits; at least 3")
        self.source, self.tokenizer, self.seed = source, tokenizer, seed
        self.length = sequence_length
        self.target_length = target_length or max(self.corruption.lengths(n)[1] for n in range(1, limit + 1))
        self.pad = tokenizer.special("pad") if tokenizer.has("pad") else 0
        self.end = tokenizer.eod
        self.start = start_token(tokenizer) if decoder_start_token_id is None else decoder_start_token_id
        described = [_FORMAT, source.fingerprint, first_document, last_document, limit, self.end]
        self.rows: Rows = open_map(described, 2, lambda: windows(source, first_document, last_document, limit, self.end), cache_dir)
        if not len(self.rows):
            raise DataError(f"{source.prefix}: documents {first_document} to {last_document} hold no text")
        options = [
            sequence_length,
            self.target_length,
            noise_density,
            mean_noise_span_length,
            self.sentinels.tolist(),
            self.start,
            seed,
        ]
        text = json.dumps([described, options, tokenizer.fingerprint])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._number = int(hashlib.sha256(f"{source.fingerprint} {first_document}".encode()).hexdigest()[:16], 16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.item(index, 0)

    def item(self, index: int, epoch: int) -> Sample:
        """Return input_ids and padding (sequence_length,), decoder_input_ids and decoder_labels (target_length,)."""
        start, stop = self.rows[index].tolist()
        tokens = self.source.read(start, stop, self.tokenizer.vocab_size)
        hidden = self.corruption(len(tokens), Draws(self.seed, self._number, epoch, index))
        first = hidden & ~np.concatenate([[False], hidden[:-1]])
        stands_for = self.sentinels[np.cumsum(first) - 1]
        inputs = np.where(first, stands_for, tokens)[first | ~hidden]
        targets = np.stack([np.where(first, stands_for, -1), np.where(hidden, tokens, -1)], 1).reshape(-1)
        targets = np.append(targets[targets >= 0], self.end)
        size, written = len(inputs) + 1, len(targets)
        sample = {
            "input_ids": np.full(self.length, self.pad, np.int64),
            "padding": np.arange(self.length) < size,
            "decoder_input_ids": np.full(self.target_length, self.pad, np.int64),
            "decoder_labels": np.full(self.target_length, IGNORE, np.int64),
        }
        sample["input_ids"][:size] = np.append(inputs, self.end)
        sample["decoder_labels"][:written] = targets
        sample["decoder_input_ids"][:written] = np.append(self.start, targets[:-1])
        return sample
