"""Open a trained model, in any layout, for evaluation and generation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from dufu.config.instantiate import resolve
from dufu.config.schema import defaults
from dufu.data.tokenizer import TextTokenizer, load_tokenizer
from dufu.errors import CheckpointError
from dufu.interchange.folder import is_folder
from dufu.parallel.build import Distributed
from dufu.parallel.layout import layout_from_config
from dufu.parallel.process import Processes, choose_device, join, settle_allocator, settle_threads, world_size
from dufu.training.adapters import compare_base
from dufu.training.checkpoint import CheckpointReader, find_weights, load_weights
from dufu.training.data import complete_model_config, tokenizer_from_config
from dufu.training.effective import effective_config
from dufu.training.precision import Precision, precision_from_config
from dufu.training.pretrained import ORIGIN, config_of_folder, end_tokens_of, has_tokenizer, left_out, named_model, open_weights
from dufu.training.run import build_model


@dataclass
class Loaded:
    """A trained model ready to run.

    Args:
        distributed: the model, laid out over the processes, in evaluation mode.
        tokenizer: the run's.
        config: the run's effective config, with this call's layout.
        precision: of forward passes.
        checkpoint: the folder the weights came from.
        step: updates they have seen.
        end_tokens: numbers of the tokens that end a text, as the folder that the model began from names them.
        prefix: tokens before a prompt, those of the tokenizer of that folder; what dufu alone trained has seen none.
    """

    distributed: Distributed
    tokenizer: TextTokenizer
    config: DictConfig
    precision: Precision
    checkpoint: Path
    step: int
    end_tokens: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()

    @property
    def processes(self) -> Processes:
        """Return this process among the others."""
        return self.distributed.processes


def load(folder: str | Path, overrides: Sequence[str] = (), data: Sequence[str] = ()) -> Loaded:
    """Load a run's newest checkpoint, a checkpoint or a Hugging Face folder, in the layout that the overrides and the processes give.

    The run's own layout plays no part: without overrides all processes are data-parallel.

    Args:
        folder: a run's folder, one of its checkpoints, or a Hugging Face folder.
        overrides: `key=value` texts, such as `train.dist.tensor_parallel_size=2`.
        data: files that replace the run's.

    Raises:
        DufuError: no complete checkpoint, a damaged one, or an impossible layout.
    """
    path = find_weights(folder)
    own = [*defaults("train.dist"), *defaults("train.zero_optimization"), "train.activation_checkpoint.enabled=false"]
    written = config_of_folder(path) if is_folder(path) else path / "config.yaml"
    config = effective_config(written, [*own, *overrides], data)
    tokenizer = tokenizer_of(path, config)
    complete_model_config(config, tokenizer)
    layout = layout_from_config(config.train, world_size())
    settle_allocator()
    settle_threads(1)
    processes = join(layout, choose_device(config.train.input_placement_device))
    precision = precision_from_config(config.train.amp, processes.device)
    distributed = build_model(config, processes, precision, trained=False, loaded=config.train.get("adapter") is None)
    base = "" if is_folder(path) else config.train.load_weight
    source = open_weights(path, config.model, distributed.store.shapes, processes.is_main, base)
    load_weights(source, distributed.store, averaged=config.train.ema.enabled)
    if processes.is_main and (line := left_out(source)):
        print(f"note: {line}", file=sys.stderr, flush=True)
    source = getattr(source, "reader", source)
    if isinstance(source, CheckpointReader):
        compare_base(source, distributed)
    distributed.model.eval()
    origin = path if is_folder(path) else path.parent.parent / ORIGIN
    end_tokens = end_tokens_of(origin)
    prefix = tuple(tokenizer.prefix) if has_tokenizer(origin) else ()
    step = int(source.state["step"]) if isinstance(source, CheckpointReader) else 0
    return Loaded(distributed, tokenizer, config, precision, path, step, end_tokens, prefix)


def tokenizer_of(checkpoint: Path, config: DictConfig) -> TextTokenizer:
    """Return the tokenizer written into the run's folder, so that the folder can move; otherwise the one that the config names.

    Raises:
        CheckpointError: a Hugging Face folder holds none, and the config names none, though the model reads text.
    """
    if is_folder(checkpoint):
        of_pictures = hasattr(resolve(named_model(config.model)[0]), "picture_tokens")
        if not of_pictures and config.tokenization.tokenizer == "bytes" and not has_tokenizer(checkpoint):
            raise CheckpointError(f"{checkpoint}: holds no tokenizer; give one with tokenization.tokenizer=FILE")
        return tokenizer_from_config(config)
    for folder in (checkpoint / "tokenizer", checkpoint.parent.parent / "tokenizer"):
        if (folder / "tokenizer.json").is_file():
            return load_tokenizer(folder)
    return tokenizer_from_config(config)
