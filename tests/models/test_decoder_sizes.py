"""Named sizes of the families of decoders have as many parameters as the published models, and as transformers' of the same config."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.config.instantiate import instantiate
from dufu.models.hf import complete, describe_folder, family_of
from dufu.training.effective import effective_config
from tests.models.published_configs import CONFIGS

# What Hugging Face's pages report of the releases.
PUBLISHED = {
    "qwen2_0.5b": 494_032_768, "qwen2_1.5b": 1_543_714_304, "qwen2_7b": 7_615_616_512, "qwen2_72b": 72_706_203_648,
    "qwen2.5_3b": 3_085_938_688, "qwen2.5_14b": 14_770_033_664, "qwen2.5_32b": 32_763_876_352, "qwen3_0.6b": 596_049_920,
    "qwen3_4b": 4_022_468_096, "qwen3_8b": 8_190_735_360, "qwen3_32b": 32_762_123_264, "qwen1.5_moe_a2.7b": 14_315_784_192,
    "qwen3_30b_a3b": 30_532_122_624, "qwen3_235b_a22b": 235_093_634_560, "mistral_7b_v0.1": 7_241_732_096,
    "mistral_7b_v0.3": 7_248_023_552, "mistral_nemo_12b": 12_247_782_400, "mixtral_8x7b": 46_702_792_704, "gemma_2b": 2_506_172_416,
    "gemma_7b": 8_537_680_896, "glm4_9b": 9_399_951_360, "chatglm3_6b": 6_243_584_000, "opt_125m": 125_239_296,
    "opt_350m": 331_196_416, "opt_1.3b": 1_315_758_080, "bloom_560m": 559_214_592, "bloom_7b1": 7_069_016_064,
    "bloom_176b": 176_247_271_424,
}  # fmt: skip
FAMILIES = ("qwen", "mistral", "mixtral", "gemma", "glm", "chatglm", "opt", "bloom")


def sizes(family: str) -> dict[str, tuple[str, dict[str, Any]]]:
    module = import_module(f"dufu.models.{family}")
    named = getattr(import_module(f"dufu.models.{family}.sizes"), "class_of", None)
    (only, *_) = [name for name in module.__all__ if name != "SIZES"]
    return {name: (named(name) if named else only, cfg) for name, cfg in module.SIZES.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_the_published_ones(family: str) -> None:
    import transformers

    seen: set[str] = set()
    for name, (kind, cfg) in sizes(family).items():
        cfg = {**cfg, "vocab_size": cfg["vocab_size"] or 261}
        target = f"dufu.models.{family}.{kind}"
        with torch.device("meta"):
            count = sum(p.numel() for p in getattr(import_module(f"dufu.models.{family}"), kind)(**cfg).parameters())
        assert count == PUBLISHED.get(name, count), name
        # transformers has no ChatGLM of its own; of the others one size a class will do, unless all are wanted.
        if family == "chatglm" or (kind in seen and os.environ.get("DUFU_MODELS") != "all"):
            continue
        seen.add(kind)
        config = transformers.AutoConfig.for_model(**family_of(target).write(target, complete(target, cfg)))
        with torch.device("meta"):
            other = transformers.AutoModelForCausalLM.from_config(config)
        assert count == sum(p.numel() for p in other.parameters()), name


def test_the_tiny_recipe_builds() -> None:
    config = effective_config("qwen3_tiny")
    config.model.cfg.vocab_size = 261
    with torch.device("meta"):
        model: Any = instantiate(config.model)
    assert model.layers[0].block.attention.query_norm is not None
    assert {module.p for module in model.modules() if type(module).__name__ == "Dropout"} == {0.1}


@pytest.mark.parametrize(("family", "name", "values"), CONFIGS, ids=[name for _, name, _ in CONFIGS])
def test_the_config_json_of_a_release_is_its_named_size(family: str, name: str, values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = describe_folder(tmp_path)
    kind, cfg = sizes(family)[name]
    assert found.target == f"dufu.models.{family}.{kind}"
    whole, read = complete(found.target, cfg), complete(found.target, found.cfg)
    inferred = {"head_size": read.get("head_size"), "ffn_hidden_size": read.get("ffn_hidden_size")}
    for key, value in whole.items():
        if key not in {"max_window_layers", "num_key_value_heads"} or key in cfg:
            assert read[key] == (inferred[key] if value is None and key in inferred else value), key
