"""Llama against the network written out from its definition, and models with mixtures of experts: what their numbers must not depend on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.config.instantiate import instantiate
from dufu.config.registry import lookup
from dufu.errors import ConfigError, LayoutError
from dufu.generation.decoding import Decoding, decode
from dufu.layers.random import token_keys
from dufu.models import GPT2, Batch, Llama
from dufu.models.llama import SIZES
from dufu.training.batches import blank
from dufu.training.effective import effective_config

VOCAB = 37
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "max_seq_length": 16,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_top_k": 2}
MIXED: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (Llama, {**SMALL, **EXPERTS, "num_key_value_heads": 2, "moe_shared_experts": 1, "moe_first_dense_layers": 1}),
    "llama with a capacity": (Llama, {**SMALL, **EXPERTS, "moe_capacity_factor": 0.8, "moe_scoring": "sigmoid"}),
    "gpt2": (GPT2, {**SMALL, **EXPERTS}),
}
EPSILON = 0.03  # large, so that a norm that ignored it would show
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # fp32 in another order, through two layers


def lively(model: nn.Module) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def mixed(name: str, **more: Any) -> Any:
    kind, arguments = MIXED[name]
    return lively(kind(**{**arguments, **more}))


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def turned(x: Tensor) -> Tensor:
    """Rotate (B, heads, T, 4): features i and i + 2 as a pair, by position · 100^(-i / 2)."""
    angles = torch.arange(x.shape[2])[:, None] * torch.tensor([1.0, 100.0**-0.5])
    first, second = x[..., :2], x[..., 2:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama_is_the_published_network(kv_heads: int, tied: bool) -> None:
    model = lively(
        Llama(**SMALL, num_key_value_heads=kv_heads, tie_word_embeddings=tied, rotary_base=100.0, layernorm_epsilon=EPSILON)
    ).eval()
    ids, labels = torch.randint(0, VOCAB, (3, 10)), torch.randint(0, VOCAB, (3, 10))
    labels[1, 4:] = -100
    hidden = model.embedding.word.weight[ids]
    for unit in model.layers:
        block = unit.block
        x = normed(hidden, block.attention_norm.weight)
        q, k, v = (x @ block.attention.query_key_value.weight.t()).split((16, 4 * kv_heads, 4 * kv_heads), -1)
        q, k, v = (t.view(3, 10, -1, 4).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(4 // kv_heads, 1) for t in (turned(k), v))
        scores = turned(q) @ k.transpose(-1, -2) / 2.0
        scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), -math.inf)
        attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        hidden = hidden + attended @ block.attention.output.weight.t()
        gate, up = (normed(hidden, block.mlp_norm.weight) @ block.mlp.gate_up.weight.t()).chunk(2, -1)
        hidden = hidden + (functional.silu(gate) * up) @ block.mlp.contract.weight.t()
    wanted = normed(hidden, model.head.norm.weight) @ (model.embedding.word.weight if tied else model.head.word.weight).t()
    torch.testing.assert_close(model(Batch(ids)), wanted, rtol=1e-4, atol=1e-4)  # scores of about ten
    sums = model(Batch(ids, labels))
    loss = functional.cross_entropy(wanted.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(sums["loss"], loss, **CLOSE)
    assert sums["tokens"] == (labels != -100).sum()
    assert model.objectives == {"loss": "tokens"}
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())


def test_no_cast_of_the_model_rounds_the_rotation() -> None:
    """B115; and the settings of long contexts reach it (B117)."""
    ids = torch.zeros(1, 16, dtype=torch.long)
    rotations = {}
    for name, scaling in (("plain", None), ("long", {"factor": 8.0, "original_length": 8})):
        model = Llama(**SMALL, rotary_scaling=scaling)
        rotations[name] = model.prepare(Batch(ids)).extra["rotation"]
        cast = model.bfloat16().prepare(Batch(ids)).extra["rotation"]
        assert cast.dtype == torch.float32 and torch.equal(cast, rotations[name])
    assert not torch.allclose(rotations["plain"], rotations["long"])


# What Hugging Face's models of the same releases report; a rotation has no parameters.
PUBLISHED = {
    "tinyllama_1b": 1_100_048_384, "llama_7b": 6_738_415_616, "llama_13b": 13_015_864_320, "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320, "llama2_70b": 68_976_648_192, "llama3_8b": 8_030_261_248, "llama3_70b": 70_553_706_496,
    "llama3.1_8b": 8_030_261_248, "llama3.2_1b": 1_235_814_400, "mixtral_8x7b": 46_702_792_704,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = Llama(**{**SIZES[name], "vocab_size": SIZES[name]["vocab_size"] or 261})
    if name in PUBLISHED:
        assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    else:
        assert name == "llama_tiny"


@pytest.mark.parametrize("hidden", [4096, 5120, 2048])
def test_the_inner_width_follows_llamas_rule(hidden: int) -> None:
    with torch.device("meta"):
        model: Any = Llama(vocab_size=8, hidden_layers=1, hidden_size=hidden)
    assert model.layers[0].block.mlp.contract.in_features == {4096: 11008, 5120: 13824, 2048: 5632}[hidden]


@pytest.mark.parametrize("name", MIXED)
def test_a_batch_in_parts_sums_to_the_whole_with_dropout_on(name: str) -> None:
    dropouts = {f"{place}_dropout_prob": 0.2 for place in ("embedding", "attention", "output")}
    model = mixed(name, **dropouts).train()
    ids, labels = torch.randint(0, VOCAB, (6, 10)), torch.randint(0, VOCAB, (6, 10))
    labels[2, 3:] = -100
    keys = token_keys(7, 3, torch.arange(6), torch.arange(10).expand(6, 10))
    assert model.objectives == {"lm_loss": "tokens", "balance_loss": "tokens", "z_loss": "tokens"}

    def run(batches: list[Batch]) -> tuple[dict[str, Tensor], list[Tensor]]:
        model.zero_grad()
        found = [model(batch) for batch in batches]
        sums = {key: sum(f[key] for f in found) for key in found[0]}
        sum(sums[objective] for objective in model.objectives).backward()
        return {k: v.detach() for k, v in sums.items()}, [p.grad.clone() for p in model.parameters()]

    whole, gradients = run([Batch(ids, labels, keys=keys)])
    parts = [Batch(ids[i : i + 2], labels[i : i + 2], keys=keys[i : i + 2]) for i in (4, 0, 2)]
    cut, cut_gradients = run([*parts, blank(parts[0])])
    for key, value in whole.items():
        torch.testing.assert_close(cut[key], value, **CLOSE)
    for found, wanted in zip(cut_gradients, gradients):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-4)  # sums over sixty tokens of gradients of about one
    empty, none = run([blank(parts[0])])
    assert all(float(empty[objective]) == 0.0 for objective in model.objectives) and not any(g.any() for g in none)


@pytest.mark.parametrize("name", MIXED)
def test_padding_on_either_side_changes_no_real_position_and_no_loss(name: str) -> None:
    model = mixed(name).eval()
    ids, labels = torch.randint(0, VOCAB, (2, 7)), torch.randint(0, VOCAB, (2, 7))
    plain = model(Batch(ids, labels))
    for left, right in ((5, 0), (0, 4)):
        padded_ids, padded_labels = functional.pad(ids, (left, right)), functional.pad(labels, (left, right), value=-100)
        places = torch.arange(7 + left + right)
        padding = ((places >= left) & (places < left + 7)).expand(2, -1)
        positions = (places - left).clamp(0, 6).expand(2, -1)
        padded = model(Batch(padded_ids, padded_labels, padding=padding, positions=positions))
        for key, value in plain.items():
            torch.testing.assert_close(padded[key], value, **CLOSE)


@pytest.mark.parametrize("name", [*MIXED, "dense"])
def test_generation_with_and_without_a_cache_is_the_same_text(name: str) -> None:
    model = lively(Llama(**SMALL, num_key_value_heads=2)) if name == "dense" else mixed(name)
    prompts = [[1, 2, 3, 4, 5], [7], [9, 8, 7]]
    texts = [
        decode(model.eval(), prompts, Decoding(max_new_tokens=8, use_cache=cached), torch.device("cpu")) for cached in (True, False)
    ]
    alone = [decode(model, [prompt], Decoding(max_new_tokens=8), torch.device("cpu"))[0] for prompt in prompts]
    assert texts[0] == texts[1] == alone


def test_first_layers_stay_dense() -> None:
    model = mixed("llama")
    assert [type(unit.block.mlp).__name__ for unit in model.layers] == ["GatedMLP", "MixtureOfExperts"]


def test_an_objective_without_weight_is_left_out() -> None:
    assert mixed("gpt2", moe_z_weight=0.0).objectives == {"lm_loss": "tokens", "balance_loss": "tokens"}
    model = mixed("gpt2", moe_z_weight=0.0, moe_balance_weight=0.0)
    ids = torch.randint(0, VOCAB, (2, 5))
    assert model.objectives == {"loss": "tokens"} and "loss" in model(Batch(ids, ids))


@pytest.mark.parametrize(("name", "layers"), [("llama_tiny", ["GatedMLP"] * 2), ("llama_moe_tiny", ["GatedMLP", "MixtureOfExperts"]),
                                              ("gpt2_moe_tiny", ["MixtureOfExperts"] * 2)])  # fmt: skip
def test_the_tiny_recipes_build_with_dropout_everywhere(name: str, layers: list[str]) -> None:
    config = effective_config(name)
    config.model.cfg.vocab_size = 261
    with torch.device("meta"):
        model = instantiate(config.model)
    assert [type(unit.block.mlp).__name__ for unit in model.layers] == layers
    assert {module.p for module in model.modules() if type(module).__name__ == "Dropout"} == {0.1}
    experts = [unit.block.mlp for unit in model.layers if type(unit.block.mlp).__name__ == "MixtureOfExperts"]
    assert all((mixture.router.num_experts, mixture.router.top_k) == (4, 2) for mixture in experts)


def test_user_mistakes_are_errors() -> None:
    with pytest.raises(ConfigError, match="vocab_size is not set"):
        Llama()
    with pytest.raises(LayoutError, match="17 tokens do not fit into max_seq_length=16"):
        Llama(**SMALL)(Batch(torch.zeros(1, 17, dtype=torch.long)))
    with pytest.raises(ConfigError, match=r"moe_top_k=2 but model\.cfg\.num_experts=0"):
        Llama(**SMALL, moe_top_k=2)
    with pytest.raises(ConfigError, match="moe_first_dense_layers=2 of 2 layers"):
        GPT2(**SMALL, num_experts=4, moe_first_dense_layers=2)
    with pytest.raises(ConfigError, match=r"rotary_scaling=.*the keys are factor, low_freq_factor"):
        Llama(**SMALL, rotary_scaling={"facter": 8.0})
    assert lookup("llama", "model") is Llama
