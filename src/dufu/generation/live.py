"""Text from the model that is being trained, in the layout it is trained in: `train.hooks=[{_target_: sample_text, prompts: […]}]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dufu.config.registry import register_hook
from dufu.errors import ConfigError
from dufu.generation.pipeline import TextGenerationPipeline
from dufu.training.averaging import averaged
from dufu.training.hooks import Hook
from dufu.training.load import Loaded
from dufu.training.loop import Trainer


@register_hook("sample_text")
class SampleText(Hook):
    """Continues prompts every so many steps, and at the end, and adds a line to `samples.jsonl` in the run's folder.

    The text is that of the weights after the step (of their averages, where the run keeps them), the same in every layout.

    Args:
        prompts: texts to continue.
        period: steps between samples.
        max_new_tokens, temperature, top_k, top_p, seed: see Decoding.

    Raises:
        ConfigError: no prompts, or a period below 1.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        period: int = 1000,
        max_new_tokens: int = 40,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        if isinstance(prompts, str) or not prompts:
            raise ConfigError(f"sample_text: prompts={prompts!r}: a list of one or more texts")
        if period < 1:
            raise ConfigError(f"sample_text: period={period}: at least 1")
        self.prompts, self.period = list(prompts), period
        self.settings: dict[str, Any] = {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed,
        }  # fmt: skip
        self._pipeline: TextGenerationPipeline | None = None

    def before_train(self, trainer: Trainer) -> None:
        """Check the prompts and the settings before any step; drop the lines past the checkpoint that a run resumes from."""
        surroundings = trainer.surroundings
        if surroundings is None:
            raise ConfigError("sample_text: needs the run's tokenizer and folder; let dufu.train build the trainer")
        step = trainer.train_step
        loaded = Loaded(
            step.distributed, surroundings.tokenizer, surroundings.config, step.precision, surroundings.folder, trainer.step
        )
        self._pipeline = TextGenerationPipeline(loaded)
        try:
            self._pipeline.check(self.prompts, **self.settings)
        except ConfigError as error:
            raise ConfigError(f"sample_text: {error}") from None
        self._file = surroundings.folder / "samples.jsonl"
        if step.distributed.processes.is_main and self._file.is_file():
            lines = self._file.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["step"] <= trainer.step]
            self._file.write_text("".join(kept), encoding="utf-8")

    def after_step(self, trainer: Trainer) -> None:
        """See Hook."""
        if trainer.step % self.period and not (trainer.finished and trainer.ending):
            return
        assert self._pipeline is not None
        step = trainer.train_step
        model = step.distributed.model
        model.eval()
        with averaged(trainer):
            found = self._pipeline(self.prompts, **self.settings)
        model.train()
        if step.distributed.processes.is_main:
            with self._file.open("a", encoding="utf-8") as file:
                texts = [{"prompt": each.prompt, "text": each.text} for each in found]
                file.write(json.dumps({"step": trainer.step, "texts": texts}, ensure_ascii=False) + "\n")
