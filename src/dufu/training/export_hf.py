"""`dufu export hf`: a run, a checkpoint or another folder as a Hugging Face folder, one tensor at a time."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from dufu.config.instantiate import instantiate
from dufu.data.seq2seq import start_token
from dufu.data.tokenizer import TextTokenizer
from dufu.errors import CheckpointError, ConfigError
from dufu.interchange.export import OutFolder, Read, dtype_of, write_json, write_weights
from dufu.interchange.folder import is_folder
from dufu.interchange.source import WeightSource
from dufu.models.hf import family_of, read_config
from dufu.models.names import Shape
from dufu.parallel.region import Region
from dufu.training.checkpoint import AVERAGE, CheckpointReader, find_weights
from dufu.training.data import dataset_class
from dufu.training.effective import effective_config
from dufu.training.effective import read_config as read_config_file
from dufu.training.load import tokenizer_of
from dufu.training.pretrained import KEPT, ORIGIN, config_of_folder, left_out, named_model, open_weights, torch_dtype


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        folder: where.
        bytes: of the tensors.
        dtype: of the tensors.
        step: updates the weights have seen.
        left_out: a line on what the source held of other heads.
    """

    folder: Path
    bytes: int
    dtype: str
    step: int
    left_out: str = ""


def shapes_of(config: DictConfig) -> dict[str, Shape]:
    """Return the shapes of a config's model, which is not made."""
    with torch.device("meta"):
        model: nn.Module = instantiate(config.model)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def model_config(checkpoint: Path) -> DictConfig:
    """Return of a checkpoint's config what its model needs: neither data nor optimizer, whose classes may not be at hand here."""
    written = read_config_file(checkpoint / "config.yaml")
    kept: dict[str, Any] = {name: written[name] for name in ("model", "tokenization") if name in written}
    dataset = written.get("dataloader", {}).get("dataset")
    if isinstance(dataset, DictConfig) and str(dataset.get("_target_")).startswith("dufu."):  # it may have something for the folder
        kept["dataloader"] = {"dataset": dataset}
    kept["train"] = {"ema": written.train.ema}
    return DictConfig(kept, flags={"allow_objects": True})


def export_folder(source: str | Path, out: str | Path, dtype: str | None = None, largest: int = 5 * 10**9) -> Exported:
    """Write a Hugging Face folder that transformers opens as it is: weights, config.json, generation_config.json, tokenizer.

    Memory holds one tensor at a time, whatever the layout that wrote the checkpoint.

    Args:
        source: a run's folder, a checkpoint, or a Hugging Face folder.
        out: a new folder.
        dtype: "float32", "bfloat16" or "float16"; None = a folder's own, float32 for what was trained.
        largest: bytes of one file, as far as whole tensors allow.

    Raises:
        DufuError: the source is incomplete, the model has no counterpart there, or `out` exists already.
    """
    path = find_weights(source)
    foreign = is_folder(path)
    config = effective_config(config_of_folder(path) if foreign else model_config(path))
    target, cfg = named_model(config.model)
    family, shapes = family_of(target), shapes_of(config)
    table, fields = family.table(target, cfg), family.write(target, cfg)
    weights = open_weights(path, config.model, shapes)
    weights.compare(shapes, (), ())
    origin = path if foreign else path.parent.parent / ORIGIN
    chosen = dtype or (torch_dtype(origin) if foreign else "float32")
    beside = None if foreign else getattr(dataset_class(config), "foreign_files", None)  # of a dataset whose samples are no text
    tokenizer = None if foreign or beside else tokenizer_of(path, config)
    files: dict[str, dict[str, Any]] = beside(config) if beside else {}
    if Path(out).resolve().is_relative_to(path.resolve()):
        raise ConfigError(f"{out}: lies within {path}, which is read; give another place")
    with OutFolder(Path(out)) as folder:
        size = write_weights(folder, table, shapes, _within_range(weights, config, chosen), chosen, largest)
        written = config_fields(fields, origin, chosen, tokenizer)
        written.update(files.pop("config.json", {}))
        write_json(folder / "config.json", written)
        for name in KEPT:
            if name != "config.json" and (origin / name).is_file():
                shutil.copyfile(origin / name, folder / name)
        for name, content in files.items():
            write_json(folder / name, content)
        if tokenizer is not None and not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json")):
            tokenizer.save(folder)
        if not (folder / "generation_config.json").is_file() and _generates(written):
            ids: dict[str, Any] = {
                name: written[name]
                for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
                if name in written
            }
            write_json(folder / "generation_config.json", ids)
    step = int(weights.state["step"]) if isinstance(weights, CheckpointReader) else 0
    return Exported(Path(out), size, chosen, step, left_out(weights))


def config_fields(fields: dict[str, Any], origin: Path, dtype: str, tokenizer: TextTokenizer | None) -> dict[str, Any]:
    """Return a whole config.json: what the model's family writes, over what the model's original folder had beside it."""
    kept = _original_fields(origin, str(fields["model_type"]))
    found = {**kept, **fields, "dtype": dtype, "torch_dtype": dtype, **_special_tokens(kept, tokenizer)}
    if found.get("is_encoder_decoder") and tokenizer is not None:
        found.setdefault("decoder_start_token_id", start_token(tokenizer))
    return found


def _generates(fields: dict[str, Any]) -> bool:
    return any("LM" in str(name) or "Generation" in str(name) for name in fields["architectures"]) and "bert" not in str(
        fields["model_type"]
    )


def _within_range(weights: WeightSource, config: DictConfig, dtype: str) -> Read:
    """Return how weights are read; one that the file's type cannot hold is refused. Where the run keeps averages they are taken."""
    limit = torch.finfo(dtype_of(dtype)[1]).max
    averaged = isinstance(weights, CheckpointReader) and config.train.ema.enabled and weights.has(AVERAGE)

    def read(name: str, shape: Shape, region: Region, memory: Tensor) -> None:
        if averaged and isinstance(weights, CheckpointReader) and (AVERAGE, name) in weights.pieces:
            weights.read(name, shape, region, memory, AVERAGE)
        else:
            weights.read(name, shape, region, memory)
        if dtype == "float16" and memory.numel() and float(memory.abs().max()) > limit:
            raise CheckpointError(f"{name} holds a value beyond what float16 can hold; write float32 or bfloat16")

    return read


def _original_fields(origin: Path, model_type: str) -> dict[str, Any]:
    """Return the config.json that the model began from: what changes no number stays as it was."""
    if not (origin / "config.json").is_file():
        return {}
    found = read_config(origin)
    return found if found.get("model_type") == model_type else {}


def _special_tokens(kept: dict[str, Any], tokenizer: TextTokenizer | None) -> dict[str, int]:
    """Return the token numbers that config.json names, where the original names none."""
    if tokenizer is None:
        return {}
    # Hugging Face's decoders begin with the token that ends a document, where there is no other.
    roles = {"eos_token_id": "eod", "bos_token_id": "eod", "pad_token_id": "pad", "cls_token_id": "cls", "sep_token_id": "sep"}
    return {name: tokenizer.special(role) for name, role in roles.items() if name not in kept and tokenizer.has(role)}
