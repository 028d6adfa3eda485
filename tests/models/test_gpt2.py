"""GPT-2 against one put together from PyTorch's own layers, and what its numbers must not depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from dufu.config.registry import lookup
from dufu.errors import ConfigError, LayoutError
from dufu.layers.random import token_keys
from dufu.models import GPT2, Batch
from dufu.models.gpt2 import SIZES

VOCAB = 37
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "max_seq_length": 16}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # fp32 in another order, through two layers


def lively(model: nn.Module) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_is_the_published_network(tied: bool) -> None:
    model = lively(GPT2(**SMALL, tie_word_embeddings=tied)).eval()
    ids, labels = torch.randint(0, VOCAB, (3, 10)), torch.randint(0, VOCAB, (3, 10))
    labels[1, 4:] = -100
    hidden = model.embedding.word.weight[ids] + model.embedding.position.weight[:10]
    for unit in model.layers:
        block = unit.block
        layer = nn.TransformerEncoderLayer(16, 4, 64, 0.0, nn.GELU("tanh"), 1e-5, batch_first=True, norm_first=True)
        pairs = {
            "self_attn.in_proj_": block.attention.query_key_value, "self_attn.out_proj.": block.attention.output,
            "linear1.": block.mlp.expand, "linear2.": block.mlp.contract, "norm1.": block.attention_norm, "norm2.": block.mlp_norm,
        }  # fmt: skip
        layer.load_state_dict({f"{k}{leaf}": getattr(m, leaf).detach() for k, m in pairs.items() for leaf in ("weight", "bias")})
        hidden = layer(hidden, src_mask=torch.ones(10, 10).triu(1).bool())
    hidden = functional.layer_norm(hidden, (16,), model.head.norm.weight, model.head.norm.bias)
    wanted = hidden @ (model.embedding.word.weight if tied else model.head.word.weight).t()
    torch.testing.assert_close(model(Batch(ids)), wanted, **CLOSE)
    torch.testing.assert_close(model(Batch(ids, last_only=True)), wanted[:, -1:], **CLOSE)
    sums = model(Batch(ids, labels))
    torch.testing.assert_close(
        sums["loss"], functional.cross_entropy(wanted.flatten(0, 1), labels.flatten(), reduction="sum"), **CLOSE
    )
    scored = labels != -100
    assert sums["tokens"] == scored.sum() and sums["correct"] == ((wanted.argmax(-1) == labels) & scored).sum()
    assert (model.head.word is model.embedding.word) == tied


def test_a_batch_in_parts_sums_to_the_whole_with_dropout_on() -> None:
    model = lively(GPT2(**SMALL)).train()
    ids, labels = torch.randint(0, VOCAB, (6, 10)), torch.randint(0, VOCAB, (6, 10))
    keys = token_keys(7, 3, torch.arange(6), torch.arange(10).expand(6, 10))
    whole = model(Batch(ids, labels, keys=keys))["loss"]
    parts = [model(Batch(ids[i : i + 2], labels[i : i + 2], keys=keys[i : i + 2]))["loss"] for i in (4, 0, 2)]
    torch.testing.assert_close(sum(parts), whole, **CLOSE)


def test_left_padding_changes_no_real_position() -> None:
    """B098 and B110: positions do not count the padding, and rows that see nothing do no harm."""
    model = lively(GPT2(**SMALL)).eval()
    ids = torch.randint(0, VOCAB, (1, 7))
    padded = functional.pad(ids, (5, 0))
    padding = torch.arange(12)[None] >= 5
    places = (torch.arange(12) - 5).clamp(min=0)[None]
    scores = model(Batch(padded, padding=padding, positions=places))
    torch.testing.assert_close(scores[:, 5:], model(Batch(ids)), **CLOSE)
    assert bool(scores.isfinite().all())


# Hugging Face's GPT2LMHeadModel of the same size reports these totals.
PUBLISHED = {"gpt2_small": 124_439_808, "gpt2_medium": 354_823_168, "gpt2_large": 774_030_080, "gpt2_xl": 1_557_611_200}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = GPT2(**SIZES[name])
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


def test_user_mistakes_are_errors() -> None:
    with pytest.raises(ConfigError, match="vocab_size is not set"):
        GPT2()
    with pytest.raises(LayoutError, match="17 tokens do not fit into max_seq_length=16"):
        GPT2(**SMALL)(Batch(torch.zeros(1, 17, dtype=torch.long)))
    assert lookup("gpt2", "model") is GPT2
