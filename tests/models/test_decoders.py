"""Every family of decoders against transformers' own model: scores, loss, gradients and text; in, out and in again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dufu.errors import CheckpointError, ConfigError
from dufu.generation.decoding import Decoding, decode
from dufu.layers.rotary import build_scaling
from dufu.models import Batch, Mixtral, hf
from dufu.models.hf import Fields, complete, family_of
from tests.models.decoders import FAMILIES, VOCAB, ours, theirs
from tests.models.foreign import export_state, import_state

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # fp32 in another order, through three layers


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Any:
    model = theirs(request.param)
    return request.param, model, *ours(model)


def saved(model: Any, folder: Path) -> dict[str, Tensor]:
    """Return what transformers writes of a model, under the names that files have."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_scores_loss_and_gradients_are_theirs(pair: Any, tmp_path: Path) -> None:
    name, _, target, cfg, _, model = pair
    other = theirs(name)
    torch.manual_seed(3)
    ids, labels = torch.randint(2, VOCAB, (3, 24)), torch.randint(2, VOCAB, (3, 24))
    labels[1, 15:] = -100
    with torch.no_grad():
        torch.testing.assert_close(model(Batch(ids)), other(ids).logits, **CLOSE)
    # Theirs shifts the labels itself.
    wanted = other(ids, labels=torch.cat((labels[:, :1], labels[:, :-1]), 1)).loss
    scored = int((labels[:, :-1] != -100).sum())
    sums = model(Batch(ids, torch.cat((labels[:, :-1], torch.full((3, 1), -100)), 1)))
    loss = sums[next(iter(model.objectives))] / scored
    torch.testing.assert_close(loss, wanted, **CLOSE)
    assert sums["tokens"] == scored
    model.zero_grad()
    loss.backward()
    wanted.backward()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    gradients, expected = export_state(model, target, cfg, gradients=True), saved(other, tmp_path)
    assert set(gradients) == set(expected)
    for key, value in expected.items():
        largest = float(value.abs().max())
        torch.testing.assert_close(
            gradients[key], value, rtol=1e-4, atol=max(2e-5 * largest, 1e-7), msg=lambda text, key=key: f"{key}: {text}"
        )


def test_greedy_text_is_theirs_with_padding_on_the_left(pair: Any) -> None:
    """Prompts of 9, 2 and 6 tokens, and text longer than every window; with and without a cache."""
    _, other, _, _, _, model = pair
    prompts = [[5, 9, 3, 30, 12, 8, 2, 40, 17], [7, 21], [33, 6, 6, 14, 2, 9]]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    real = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    text = other.generate(ids, attention_mask=real, max_new_tokens=12, do_sample=False, pad_token_id=0)
    for use_cache in (True, False):
        found = decode(model, prompts, Decoding(max_new_tokens=12, use_cache=use_cache), torch.device("cpu"))
        assert found == text[:, longest:].tolist()


def test_scores_of_real_tokens_are_theirs_beside_padding(pair: Any) -> None:
    name, other, _, _, _, model = pair
    ids = torch.randint(2, VOCAB, (2, 14), generator=torch.Generator().manual_seed(5))
    real = torch.ones(2, 14, dtype=torch.bool)
    real[0, :6] = False
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    arguments = {} if name.startswith(("bloom", "opt")) else {"position_ids": positions}  # those count real tokens themselves
    with torch.no_grad():
        wanted = other(ids, attention_mask=real.long(), **arguments).logits
        found = model(Batch(ids, positions=positions, padding=real))
    torch.testing.assert_close(found[real], wanted[real], **CLOSE)


def test_what_is_written_is_what_was_read(pair: Any, tmp_path: Path) -> None:
    """Bit-identical under the same names; transformers opens it and computes the same; and it is read as the same model."""
    import transformers

    _, other, target, cfg, state, model = pair
    back = export_state(model, target, cfg)
    assert set(back) == set(state)
    assert all(torch.equal(back[name], value) for name, value in state.items())
    whole = complete(target, cfg)
    fields = family_of(target).write(target, whole)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(back, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(other)
    ids = torch.randint(2, VOCAB, (1, 40), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        # Weights in a file's memory are aligned otherwise, which changes the order of sums.
        torch.testing.assert_close(again.eval()(ids).logits, other(ids).logits, rtol=1e-5, atol=1e-5)
    found = hf.describe_folder(tmp_path)
    again_whole = complete(target, found.cfg)
    if whole.get("rotary_scaling"):  # with every default written out
        assert build_scaling(whole["rotary_scaling"]) == build_scaling(again_whole["rotary_scaling"])
        whole = {**whole, "rotary_scaling": again_whole["rotary_scaling"]}
    assert (found.target, again_whole) == (target, whole)
    # What transformers writes of it reads the same once more.
    again.save_pretrained(tmp_path / "again")
    found = hf.describe_folder(tmp_path / "again")
    assert {k: v for k, v in complete(target, found.cfg).items() if whole[k] != v} == {}


@pytest.mark.parametrize("name", ["llama", "qwen2 with yarn", "mistral", "gemma", "glm", "opt", "bloom"])
def test_in_bf16_it_is_as_near_to_float32_as_theirs(name: str) -> None:
    """B115: nothing is rounded by the cast of the model that theirs keeps, such as the rotation."""
    other = theirs(name)
    *_, model = ours(other)
    ids = torch.randint(2, VOCAB, (4, 60), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        exact = other(ids).logits
        off = [
            float((scores.float() - exact).abs().mean()) for scores in (model.bfloat16()(Batch(ids)), other.bfloat16()(ids).logits)
        ]
    assert off[0] < 1.2 * off[1]


# B117: everything that is not the default.
UNUSUAL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_layers": 2, "hidden_size": 32, "ffn_hidden_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_seq_length": 512, "layernorm_epsilon": 1e-3, "initializer_range": 0.3, "activation": "gelu_tanh",
    "rotary_base": 500000.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "more"),
    [
        ("llama.Llama", {"head_size": 16, "rotary_scaling": {"factor": 8.0, "original_length": 64}}),
        ("qwen.Qwen2", {"tie_word_embeddings": True, "sliding_window": 100, "max_window_layers": 1}),
        ("qwen.Qwen3", {"head_size": 16, "rotary_scaling": {"kind": "linear", "factor": 3.0}}),
        ("mistral.Mistral", {"sliding_window": 300, "head_size": 10}),
        ("gemma.Gemma", {"tie_word_embeddings": False, "head_size": 16, "activation": "silu"}),
        ("glm.Glm", {"head_size": 16, "partial_rotary_factor": 0.25}),
        ("qwen.Qwen2", {"rotary_scaling": {"kind": "yarn", "factor": 4.0, "original_length": 128, "attention_factor": 1.3}}),
        ("mixtral.Mixtral", {"num_experts": 3, "sliding_window": 50}),
        ("qwen.Qwen3Moe", {"num_experts": 5, "moe_top_k": 3, "moe_ffn_hidden_size": 16, "moe_first_dense_layers": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_setting_is_lost_on_the_way_out(target: str, more: dict[str, Any], tmp_path: Path) -> None:
    """B117: scores at position 500 after export, in transformers."""
    import transformers

    from dufu.config.instantiate import resolve

    target, cfg = f"dufu.models.{target}", {**UNUSUAL, **more}
    torch.manual_seed(2)
    model = resolve(target)(**cfg).eval()
    (tmp_path / "config.json").write_text(json.dumps(family_of(target).write(target, complete(target, cfg))))
    save_file(export_state(model, target, cfg), tmp_path / "model.safetensors", metadata={"format": "pt"})
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(2, VOCAB, (1, 501))
    with torch.no_grad():
        scores = other(ids).logits
        torch.testing.assert_close(model(Batch(ids)), scores, rtol=1e-4, atol=1e-4)
    assert float(scores[0, 500].abs().max()) > 0.5


def chatglm_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a GLM's tensors under the names, and fused, as ChatGLM's own code has them."""
    names = {
        "self_attn.o_proj": "self_attention.dense", "mlp.gate_up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h",
        "model.embed_tokens": "transformer.embedding.word_embeddings", "model.norm": "transformer.encoder.final_layernorm",
        "lm_head": "transformer.output_layer", "model.layers": "transformer.encoder.layers",
    }  # fmt: skip
    found = {}
    for name, value in state.items():
        if ".q_proj." in name:
            value = torch.cat([state[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"])
        elif ".k_proj." in name or ".v_proj." in name:
            continue
        name = name.replace("self_attn.q_proj", "self_attention.query_key_value")
        for theirs_, renamed in names.items():
            name = name.replace(theirs_, renamed)
        found[name] = value
    return found


def test_chatglms_own_format_is_the_same_network() -> None:
    other = theirs("glm")
    _, _, state, _ = ours(other)
    values = {
        "model_type": "chatglm", "padded_vocab_size": VOCAB, "num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 40,
        "num_attention_heads": 4, "multi_query_group_num": 2, "multi_query_attention": True, "kv_channels": 12, "seq_length": 64,
        "layernorm_epsilon": 1e-4, "add_qkv_bias": True, "rope_ratio": 0.05, "rmsnorm": True, "torch_dtype": "float16",
    }  # fmt: skip
    fields = Fields(values)
    target, cfg = hf._family(hf.HOMES["chatglm"]).read(fields)
    fields.done()
    mine = chatglm_state(state)
    mine["transformer.rotary_pos_emb.inv_freq"] = torch.ones(3)
    model = import_state(target, cfg, mine)
    ids = torch.randint(2, VOCAB, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(model(Batch(ids)), other(ids).logits, **CLOSE)
    back = export_state(model, target, cfg)
    assert set(back) == set(mine) - {"transformer.rotary_pos_emb.inv_freq"}
    assert all(torch.equal(value, mine[name]) for name, value in back.items())
    again = family_of(target).read(Fields(family_of(target).write(target, complete(target, cfg))))
    assert complete(*again) == complete(target, cfg)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
     "layer_types"),
    ("qwen2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.* is not built"),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "lacks.*original_max_position_embeddings"),
    ("qwen2", {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}}, "unknown.*mscale"),
    ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("qwen3", {"attention_bias": True}, "attention_bias=True"),
    ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ("qwen2_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 50}, "shared_expert_intermediate_size=50"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm=True"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm=True"),
    ("bloom", {"logit_scale": 2.0}, "logit_scale=2.0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_would_change_the_numbers_is_refused(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    theirs(name).config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    if "rope_scaling" in change or "partial_rotary_factor" in change:
        values.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(CheckpointError, match=message):
        hf.describe_folder(tmp_path)


def test_mixtrals_weights_of_one_expert_would_be_constant() -> None:
    with pytest.raises(ConfigError, match="moe_renormalize=true makes the weight of a single expert 1"):
        Mixtral(**UNUSUAL, moe_top_k=1)


def test_gemma_2_is_no_family_here(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    with pytest.raises(CheckpointError, match="model_type='gemma2' is no family"):
        hf.describe_folder(tmp_path)
