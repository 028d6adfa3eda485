"""Every family of decoders and encoders, from a Hugging Face folder into a layout: transformers' own scores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.interchange.targets import scores
from tests.models import decoders, test_encoders_hf
from tests.pool import Ranks

EVERY = os.environ.get("DUFU_MODELS") == "all"
LAYOUTS = {
    "tp2": (2, ["train.dist.tensor_parallel_size=2"]),
    "pp2": (2, ["train.dist.pipeline_parallel_size=2"]),
    "tp2xpp2": (4, ["train.dist.tensor_parallel_size=2", "train.dist.pipeline_parallel_size=2"]),
}
ENCODERS = [kind for kind in test_encoders_hf.KINDS if not kind.endswith("Model")]
# One key-value head, or five heads, do not divide over two processes.
UNDIVIDED = {"gemma", "bloom"}
CASES = [
    (kind, layout)
    for kind in (*decoders.FAMILIES, *ENCODERS)
    for layout in LAYOUTS
    if (EVERY or (layout == "tp2xpp2") is (kind not in UNDIVIDED)) and not (kind in UNDIVIDED and layout != "pp2")
]


def write_tokenizer(folder: Path, words: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_scores_are_transformers_own(kind: str, layout: str, ranks: Ranks, tmp_path: Path) -> None:
    theirs: Any = decoders.theirs(kind) if kind in decoders.FAMILIES else test_encoders_hf.foreign(kind)
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, decoders.VOCAB)
    ids = torch.randint(2, decoders.VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = theirs(ids)
        expected = output.prediction_logits if hasattr(output, "prediction_logits") else output.logits
    size, overrides = LAYOUTS[layout]
    total = sum(parameter.numel() for parameter in theirs.parameters())
    for found, held in ranks(size, scores, str(tmp_path), overrides, ids.tolist()):
        assert (found - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
        assert sum(count for _, count in held) < 0.9 * total
