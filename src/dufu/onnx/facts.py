"""`dufu_onnx.json`: what an exported folder holds, as far as the graphs themselves do not say it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dufu.errors import CheckpointError

FILE = "dufu_onnx.json"
FORMAT = 1


@dataclass(frozen=True)
class Facts:
    """What an exported folder holds.

    Args:
        kind: how the graphs are called: "decoder", "encoder", "encoder_decoder" or "picture".
        model: dotted path of the class that was exported.
        graphs: file names, in the order in which they are called.
        vocab_size: words that are scored; 0 where there are none.
        max_seq_length: most tokens; 0 where there are none.
        caches: key-value heads and head size of each layer that keeps a cache.
        start_token: with which an encoder-decoder model begins its text; -1 for the others.
        end_tokens: which end a text, beside the tokenizer's own where none is named.
        prefix: tokens before a prompt.
        opset: version of the operator set.
        format: of this file.
    """

    kind: str
    model: str
    graphs: list[str]
    vocab_size: int = 0
    max_seq_length: int = 0
    caches: list[list[int]] = field(default_factory=list)
    start_token: int = -1
    end_tokens: list[int] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    opset: int = 0
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write the file into a folder."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def holds_graphs(folder: str | Path) -> bool:
    """Say whether a folder is one that `dufu export onnx` wrote."""
    return (Path(folder) / FILE).is_file()


def read_facts(folder: Path) -> Facts:
    """Return what an exported folder holds.

    Raises:
        CheckpointError: the file is damaged, or of another version.
    """
    path = folder / FILE
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        facts = Facts(**found)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); export the model again") from None
    defaults = Facts("", "", [])
    wrong = [f.name for f in fields(Facts) if type(getattr(facts, f.name)) is not type(getattr(defaults, f.name))]
    if facts.format != FORMAT:
        raise CheckpointError(f"{path}: of format {facts.format}, but this dufu reads {FORMAT}; export the model again")
    pairs = all(isinstance(c, list) and len(c) == 2 and all(isinstance(n, int) and n > 0 for n in c) for c in facts.caches or ())
    outside = [name for name in facts.graphs if Path(str(name)).name != name]
    if wrong or not pairs or outside:
        raise CheckpointError(f"{path}: damaged ({', '.join(wrong or outside) or 'caches'}); export the model again")
    return facts
