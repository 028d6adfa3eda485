"""Masked language modelling: which tokens are hidden, by what, as a function of (seed, epoch, sample) alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dufu.data.tokenizer import TextTokenizer
from dufu.errors import ConfigError

IGNORE = -100
Tokens = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_64_BITS = (1 << 64) - 1


class Draws:
    """Random numbers that belong to a sample: a stream of the counter-based generator Philox, named by four numbers.

    Only `random` of NumPy's generator is used, whose values every version gives alike.

    Args:
        seed, source: the run's seed, and a number of the data from which the sample comes.
        epoch, sample: of what the numbers are a function.
    """

    def __init__(self, seed: int, source: int, epoch: int, sample: int) -> None:
        key = np.array([seed & _64_BITS, source & _64_BITS], np.uint64)
        counter = np.array([0, 0, epoch & _64_BITS, sample & _64_BITS], np.uint64)
        self._generator = np.random.Generator(np.random.Philox(key=key, counter=counter))

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Return numbers in [0, 1)."""
        return self._generator.random(count)

    def below(self, size: int) -> int:
        """Return one of 0 … size - 1."""
        return min(size - 1, int(self._generator.random() * size))

    def order(self, size: int) -> Tokens:
        """Return 0 … size - 1 in a random order."""
        return np.argsort(self._generator.random(size), kind="stable")


class Masker:
    """Hides tokens as BERT does (Devlin et al., 2018), whole words and runs of words if asked.

    Of the tokens chosen 80 % become the mask token, 10 % a random word of the vocabulary, 10 % stay; each chosen token's label is what it
    was. Runs of 1 … `max_ngrams` words are drawn with weights 1/n (as in ALBERT, Lan et al., 2019). The budget is
    round(`probability` × text tokens), at least 1 and at most `max_predictions`; a run is shortened, and a word passed over, that does not fit
    into what is left of it; only where no word at all fits the shortest one is hidden whole.

    Args:
        tokenizer: gives the mask token and the words.
        probability: share of the text's tokens to predict.
        max_predictions: most tokens to predict in a sample.
        max_ngrams: longest run of words.
    """

    def __init__(
        self, tokenizer: TextTokenizer, probability: float = 0.15, max_predictions: int | None = None, max_ngrams: int = 3
    ) -> None:
        if not 0.0 < probability <= 1.0:
            raise ConfigError(f"dataloader.dataset.mask_probability={probability}: above 0, at most 1")
        for name, value in (("max_predictions", max_predictions), ("max_ngrams", max_ngrams)):
            if value is not None and value < 1:
                raise ConfigError(f"dataloader.dataset.{name}={value}: at least 1")
        self.probability, self.max_predictions, self.max_ngrams = probability, max_predictions, max_ngrams
        self.mask = tokenizer.special("mask")
        self.ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), sorted(tokenizer.special_numbers))
        weights = 1.0 / np.arange(1, max_ngrams + 1)
        self._shares = np.cumsum(weights)  # of runs of 1, 2, … words, not yet divided by their sum

    def __call__(self, tokens: Tokens, text: Flags, continues: Flags, draws: Draws) -> tuple[Tokens, Tokens]:
        """Return what the model sees and what it shall say.

        Args:
            tokens: the sample's (T,).
            text: true for tokens that may be hidden.
            continues: true for a token that belongs to the word of the token before it.
            draws: the sample's random numbers.

        Returns:
            inputs (T,) and labels (T,), IGNORE where nothing is asked.
        """
        labels = np.full(tokens.shape, IGNORE, np.int64)
        chosen = self._choose(text, continues, draws)
        if not len(chosen):
            return tokens, labels
        labels[chosen] = tokens[chosen]
        kind, word = draws.uniform(len(chosen)), draws.uniform(len(chosen))
        random = self.ordinary[(word * len(self.ordinary)).astype(np.int64)]
        inputs = tokens.copy()
        inputs[chosen] = np.where(kind < 0.8, self.mask, np.where(kind < 0.9, random, tokens[chosen]))
        return inputs, labels

    def _choose(self, text: Flags, continues: Flags, draws: Draws) -> Tokens:
        """Return the places to hide, ascending."""
        places = np.flatnonzero(text)
        if not len(places):
            return places
        budget = max(1, round(self.probability * len(places)))
        if self.max_predictions is not None:
            budget = min(budget, self.max_predictions)
        # A word begins where a token does not continue one, or where the token before it is no text.
        begins = np.flatnonzero(~continues[places] | (np.diff(places, prepend=-2) != 1))
        bounds = np.append(begins, len(places)).tolist()
        words = len(begins)
        order = draws.order(words).tolist()
        runs = draws.uniform(words)
        taken = bytearray(words)
        left = budget
        for word in order:
            if left == 0:
                break
            if taken[word]:
                continue
            run = self._run_length(float(runs[word]), words - word)
            while run and (bounds[word + run] - bounds[word] > left or any(taken[word : word + run])):
                run -= 1
            if run:
                taken[word : word + run] = b"\1" * run
                left -= bounds[word + run] - bounds[word]
        if left == budget:
            taken[int(np.argmin(np.diff(bounds)))] = 1
        return places[np.repeat(np.frombuffer(bytes(taken), np.bool_), np.diff(bounds))]

    def _run_length(self, draw: float, available: int) -> int:
        """Return 1 … min(max_ngrams, available) with weights 1/n."""
        shares = self._shares[: min(self.max_ngrams, available)]
        return min(len(shares), int(np.searchsorted(shares, draw * shares[-1], side="right")) + 1)
