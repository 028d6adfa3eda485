"""Loading a sharded Hugging Face folder from a cold cache, beside the disk's own rate and transformers' from_pretrained."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Contender, measure, ratio

# 270 million parameters, 1.1 GB in float32, in files of at most 200 MB.
CFG = {
    "vocab_size": 32000, "hidden_layers": 16, "hidden_size": 1024, "ffn_hidden_size": 2816, "num_attention_heads": 16, "max_seq_length": 128,
}  # fmt: skip


def write_folder(folder: Path) -> int:
    """Write the folder; return the bytes of its tensors."""
    from dufu.config.instantiate import resolve
    from dufu.data.tokenizer import byte_tokenizer
    from dufu.interchange.export import write_weights
    from dufu.models.hf import complete, family_of

    target = "dufu.models.llama.Llama"
    family, whole = family_of(target), complete(target, CFG)
    with torch.device("meta"):
        model = resolve(target)(**CFG)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}

    def values(name: str, shape: Any, region: Any, memory: torch.Tensor) -> None:
        memory.normal_(0.0, 0.02)

    size = write_weights(folder, family.table(target, whole), shapes, values, "float32", 200_000_000)
    (folder / "config.json").write_text(json.dumps(family.write(target, whole)))
    byte_tokenizer().save(folder)
    return size


def _forget(folder: Path) -> None:
    """Let the system drop the folder's files from its cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def raw(folder: str) -> Callable[[], Any]:
    """Return a function that reads the files and does nothing with them."""

    def step() -> None:
        _forget(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 22):
                    pass

    return step


def dufu(folder: str, overrides: tuple[str, ...] = (), whole: bool = False) -> Callable[[], Any]:
    """Return a function that loads the folder in a layout.

    Args:
        whole: config, model and tokenizer too, from nothing; otherwise the weights alone, into a model that is there.
    """
    from dufu.training.checkpoint import load_weights
    from dufu.training.load import load
    from dufu.training.pretrained import open_weights

    loaded = load(folder, overrides)

    def step() -> None:
        if int(os.environ.get("RANK", 0)) == 0:
            _forget(Path(folder))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if whole:
            load(folder, overrides)
        else:
            store = loaded.distributed.store
            load_weights(open_weights(Path(folder), loaded.config.model, store.shapes), store)

    return step


def transformers(folder: str) -> Callable[[], Any]:
    """Return a function that opens the folder with transformers."""
    from transformers import AutoModelForCausalLM

    def step() -> None:
        _forget(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder)
        sum(float(p.view(-1)[:: 1 << 10].sum()) for p in model.parameters())  # what is only mapped is read when it is used

    return step


def measure_folder(rounds: int) -> list[tuple[str, str, str]]:
    """Return rows of (what, ratio, figure)."""
    folder = Path(tempfile.mkdtemp(dir=Path.cwd(), prefix=".bench-folder-"))
    try:
        total = write_folder(folder)
        os.sync()
        tensor, pipeline = ("train.dist.tensor_parallel_size=2",), ("train.dist.pipeline_parallel_size=2",)
        contenders = [
            Contender("read", raw, (str(folder),)),
            Contender("weights, one process", dufu, (str(folder),)),
            Contender("weights, tp2", dufu, (str(folder), tensor), 2, 1),
            Contender("weights, pp2", dufu, (str(folder), pipeline), 2, 1),
            Contender("config, model, weights and tokenizer", dufu, (str(folder), (), True)),
            Contender("transformers, config, model and weights", transformers, (str(folder),)),
        ]
        found = measure(contenders, rounds, steps=1)
    finally:
        shutil.rmtree(folder)
    rows = []
    for contender in contenders[1:]:
        r = found[contender.name]
        rate = f"{total / r.median / 1e6:.0f} MB/s; {r.median:.2f} s ({r.least:.2f}–{r.most:.2f})"
        rows.append((f"{contender.name} / reading the same files", f"{1 / ratio(found, contender.name, 'read'):.2f}", rate))
    r = found["read"]
    rows.append(
        ("reading the same files", "1", f"{total / r.median / 1e6:.0f} MB/s; {r.median:.2f} s ({r.least:.2f}–{r.most:.2f})")
    )
    return rows
