"""Prompts in, texts out, from a run's folder, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from dufu.errors import ConfigError, nearest
from dufu.generation.decoding import Decoding, decode, room
from dufu.generation.seq2seq import decode_target, encode_source, first_token, target_room
from dufu.onnx import LoadedOnnx, holds_graphs, load_onnx
from dufu.training.load import Loaded, load


@dataclass(frozen=True)
class Generated:
    """One prompt's result.

    Args:
        prompt: the prompt.
        text: what follows it, or what an encoder-decoder model answers.
        tokens: the new tokens.
        is_answer: whether the text does not continue the prompt.
    """

    prompt: str
    text: str
    tokens: list[int]
    is_answer: bool = False

    @property
    def whole(self) -> str:
        """Return what is to be read: prompt and text together, or an answer alone."""
        return self.text if self.is_answer else self.prompt + self.text


class TextGenerationPipeline:
    """Continues prompts with a trained model; an encoder-decoder model answers them.

    Args:
        folder: a run's folder or a checkpoint.
        overrides: `key=value` texts, such as `train.dist.tensor_parallel_size=2`.
        batch_size: prompts decoded together on one process.
    """

    def __init__(self, folder: str | Path | Loaded, overrides: Sequence[str] = (), batch_size: int = 16) -> None:
        self.loaded: Loaded | LoadedOnnx
        if isinstance(folder, Loaded):
            self.loaded = folder
        else:
            self.loaded = load_onnx(folder, overrides) if holds_graphs(folder) else load(folder, overrides)
        model: Any = self.loaded.model if isinstance(self.loaded, LoadedOnnx) else self.loaded.distributed.model
        self.answers = bool(getattr(model, "is_encoder_decoder", False))
        if not (self.answers or getattr(model, "causal", False)):
            raise ConfigError(f"{type(model).__name__} is no causal model, it does not continue text; train one such as gpt2")
        self.model, self.batch_size = model, batch_size
        self._forward = None if isinstance(self.loaded, LoadedOnnx) else self.loaded.distributed.runner.forward_everywhere

    def __call__(
        self, prompts: str | Sequence[str], on_text: Callable[[str], None] | None = None, **settings: Any
    ) -> list[Generated]:
        """Continue each prompt; every process gets all results.

        Args:
            prompts: one text or several.
            on_text: called with each new piece of text, for a single prompt.
            settings: fields of `Decoding`; without `end_tokens` those that the model's Hugging Face folder names end a
                row, or else the tokenizer's end-of-document token.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        decoding = self.decoding(**settings)
        tokenizer = self.loaded.tokenizer
        encoded = self._encode(texts)
        data, layout = self.loaded.processes.data, self.loaded.processes.layout
        mine = np.array_split(np.arange(len(texts)), data.size)[data.rank].tolist()
        if layout.zero_stage == 3 or layout.expert > 1:
            mine = list(range(len(texts)))  # each forward gathers weights or meets experts, so all processes make the same ones
        # Rows of one length need no padding; results go back to their places.
        order = sorted(mine, key=lambda i: len(encoded[i]))
        repeats = _numbered(encoded)
        found: dict[int, list[int]] = {}
        stream = self._stream(on_text) if on_text and len(texts) == 1 else None
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            rows = self._decode(
                self.model,
                [encoded[i] for i in chosen],
                decoding,
                self.loaded.processes.device,
                on_token=stream,
                repeats=[repeats[i] for i in chosen],
                vocabulary=tokenizer.vocab_size,
                forward=self._forward,
            )
            found.update(zip(chosen, rows))
        for part in data.objects(found):
            found.update(part)
        return [Generated(text, tokenizer.decode(found[i]), found[i], self.answers) for i, text in enumerate(texts)]

    def _decode(self, *args: Any, **options: Any) -> list[list[int]]:
        if self.answers:
            options["start"] = first_token(self.model, self.loaded.tokenizer)
            return decode_target(*args, **options)
        return decode(*args, **options)

    def check(self, prompts: Sequence[str], **settings: Any) -> None:
        """Raise ConfigError where prompts or settings could not be decoded, without decoding."""
        decoding = self.decoding(**settings)
        for text, ids in zip(prompts, self._encode(prompts)):
            try:
                (target_room if self.answers else room)(decoding, self.model, len(ids))
            except ConfigError as error:
                raise ConfigError(f"prompt {text!r}: {error}") from None

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        tokenizer = self.loaded.tokenizer
        if self.answers:
            encoded = [encode_source(tokenizer, text) for text in texts]
        else:
            prefix = list(self.loaded.prefix)
            encoded = [prefix + ids if (ids := tokenizer.encode(text)) else [] for text in texts]
        for text, ids in zip(texts, encoded):
            if not ids:
                raise ConfigError(f"prompt {text!r} has no tokens; give at least one character")
        return encoded

    def decoding(self, **settings: Any) -> Decoding:
        """Return the settings as a Decoding; an unknown name is an error."""
        known = [item.name for item in fields(Decoding)]
        for name in settings:
            if name not in known:
                raise ConfigError(f"no decoding setting is called {name}{nearest(name, known)}")
        decoding = Decoding(**settings)
        size = self.loaded.tokenizer.vocab_size
        for token in decoding.end_tokens:
            if not 0 <= token < size:
                raise ConfigError(f"end_tokens={token}: the tokenizer's tokens are 0 to {size - 1}")
        if not decoding.end_tokens and self.loaded.end_tokens:
            decoding = replace(decoding, end_tokens=tuple(token for token in self.loaded.end_tokens if token < size))
        if not decoding.end_tokens and self.loaded.tokenizer.has("eod"):
            decoding = replace(decoding, end_tokens=(self.loaded.tokenizer.eod,))
        return decoding

    def _stream(self, on_text: Callable[[str], None]) -> Callable[[list[int]], None]:
        """Return a token callback that passes on whole characters only."""
        tokens: list[int] = []
        shown = ""

        def take(step: list[int]) -> None:
            nonlocal shown
            if step[0] >= 0:
                tokens.append(step[0])
            text = self.loaded.tokenizer.decode(tokens)
            if text.startswith(shown) and not text.endswith("�"):
                on_text(text[len(shown) :])
                shown = text

        return take


def _numbered(encoded: Sequence[Sequence[int]]) -> list[int]:
    """Return how often each prompt came before, so that equal prompts get texts of their own, wherever they are decoded."""
    seen: dict[tuple[int, ...], int] = {}
    out = []
    for ids in encoded:
        out.append(seen.get(tuple(ids), 0))
        seen[tuple(ids)] = out[-1] + 1
    return out


def generate(folder: str | Path, prompts: str | Sequence[str], overrides: Sequence[str] = (), **settings: Any) -> list[str]:
    """Return the continuation of each prompt.

    Args:
        folder: a run's folder or a checkpoint.
        prompts: one text or several.
        overrides: `key=value` texts.
        settings: fields of `Decoding`, such as max_new_tokens=50, temperature=0.8, top_k=40, seed=1.
    """
    return [result.text for result in TextGenerationPipeline(folder, overrides)(prompts, **settings)]
