"""The shipped recipes and config parts of the two families: they load, check, and build the published networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dufu.config import get_config
from dufu.config.instantiate import instantiate
from dufu.training.effective import effective_config

RECIPES = {"gpt2_small": 124_439_808, "bert_base": 110_106_428}  # parameters, as Hugging Face's models of these names report them


def built(call: Any, **cfg: Any) -> torch.nn.Module:
    for key, value in cfg.items():
        call.cfg[key] = value
    with torch.device("meta"):
        model: torch.nn.Module = instantiate(call)
    return model


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_recipe_builds_the_published_network(name: str) -> None:
    config = effective_config(name)
    assert sum(p.numel() for p in built(config.model).parameters()) == RECIPES[name]
    assert config.train.amp.enabled
    dropouts = [config.model.cfg[f"{place}_dropout_prob"] for place in ("embedding", "attention", "output")]
    assert dropouts == [0.1, 0.1, 0.1]


@pytest.mark.parametrize("name", ["gpt2_tiny", "bert_tiny"])
def test_a_tiny_recipe_is_two_layers_of_128_with_dropout_everywhere(name: str) -> None:
    config = effective_config(name)
    cfg = config.model.cfg
    sizes = (cfg.hidden_layers, cfg.hidden_size, cfg.num_attention_heads, cfg.max_seq_length, cfg.vocab_size)
    assert sizes == (2, 128, 4, 128, None) and config.tokenization.tokenizer == "bytes"
    model = built(config.model, vocab_size=261)
    dropouts = {module.p for module in model.modules() if type(module).__name__ == "Dropout"}
    assert dropouts == {0.1}
    assert model.layers[0].block.attention.head_size == 32  # type: ignore[union-attr, index]


def test_libais_config_parts_build_under_its_names() -> None:
    gpt = get_config("common/models/gpt.py")
    assert (gpt.cfg.hidden_layers, gpt.cfg.hidden_size, gpt.cfg.num_attention_heads) == (6, 384, 12)
    built(gpt.pretrain_model)
    bert = get_config("common/models/bert.py")
    assert (bert.cfg.hidden_layers, bert.cfg.hidden_size, bert.cfg.num_tokentypes) == (24, 768, 2)
    built(bert.pretrain_model, hidden_layers=2)
    assert built(bert.classification_model, hidden_layers=2, num_labels=5).head.num_labels == 5  # type: ignore[union-attr]
