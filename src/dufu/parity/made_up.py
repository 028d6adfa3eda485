"""Text and labels that nobody needs to have: for comparing layouts without data."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from dufu.data.blend import sample_of
from dufu.layers.loss import IGNORE

_LETTERS = "etaoinshrdlucmfwygpb"


def write_made_up_text(path: Path, words: int, seed: int) -> Path:
    """Write seeded words as documents of unequal lengths, one a line, in sentences; return the path."""
    draw = np.random.default_rng(seed)
    known = ["".join(draw.choice(list(_LETTERS), size=draw.integers(2, 9))) for _ in range(500)]
    lines: list[str] = []
    written = 0
    while written < words:
        length = int(draw.integers(4, 80))
        chosen = [known[i] for i in np.minimum(draw.geometric(0.02, size=length), len(known)) - 1]
        ends = [f"{word}." if draw.random() < 0.15 else word for word in chosen]
        lines.append(f"{' '.join(ends).rstrip('.')}.")
        written += length
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class UnequallyScored:
    """A dataset whose samples score unequal numbers of tokens: of each some of the first labels stay.

    A layout that takes the mean of its processes' means then differs from one process.

    Args:
        dataset: whose samples have `labels` or `decoder_labels` (T,); other samples stay as they are.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.fingerprint = f"unequally scored {getattr(dataset, 'fingerprint', None)}"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.item(index, 0)

    def item(self, index: int, epoch: int) -> dict[str, Any]:
        """Return a sample of an epoch."""
        sample = dict(sample_of(self.dataset, index, epoch))
        name = "labels" if "labels" in sample else "decoder_labels"
        labels = sample.get(name)
        if labels is not None and labels.ndim == 1:
            scored = np.flatnonzero(labels != IGNORE)
            draw = int.from_bytes(hashlib.sha256(f"{index} {epoch}".encode()).digest()[:4], "big")
            kept = 1 + draw % max(1, len(scored))
            labels = labels.copy()
            labels[scored[kept:]] = IGNORE
            sample[name] = labels
        return sample


__all__ = ["UnequallyScored", "write_made_up_text"]
