"""Answers of encoder-decoder models are transformers' greedy ones, token for token, with and without a cache, alone and in company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.errors import ConfigError
from dufu.generation.decoding import Decoding
from dufu.generation.seq2seq import decode_target
from dufu.models import T5
from tests.models import test_t5
from tests.models.foreign import import_state
from tests.pool import Ranks

PROMPTS = [[5, 17, 33, 2, 90, 41, 8, 1], [44, 0, 3, 1], [7, 7, 7, 60, 21, 1], [9, 1]]
ENDS = (4, 62, 60)
CPU = torch.device("cpu")


def written(model: Any, count: int = 12, **settings: Any) -> list[list[int]]:
    """Return transformers' greedy answers to the prompts, one at a time: no padding, no start and end tokens.

    Its cache has as many layers as the encoder, too few for these decoders (5.24).
    """
    settings["use_cache"] = False
    found = []
    for prompt in PROMPTS:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=list(ENDS), pad_token_id=0, **settings
        )
        tokens = out[0, 1:].tolist()
        found.append(tokens[: next((i for i, token in enumerate(tokens) if token in ENDS), None)])
    return found


@pytest.fixture(scope="module", params=["t5", "t5 v1.1", "mt5"])
def pair(request: Any, tmp_path_factory: Any) -> tuple[Any, Any]:
    theirs = test_t5.theirs(request.param)
    with torch.no_grad():  # so that an answer does not only repeat its last token
        for name, parameter in theirs.decoder.named_parameters():
            if name.endswith(("o.weight", "wo.weight")):
                parameter *= 12
    target, cfg = test_t5.described(theirs, tmp_path_factory.mktemp("config"))
    return theirs, import_state(target, cfg, theirs.state_dict())


@pytest.mark.parametrize("cache", [True, False])
def test_greedy_answers_are_transformers(cache: bool, pair: tuple[Any, Any]) -> None:
    theirs, mine = pair
    decoding = Decoding(max_new_tokens=12, end_tokens=ENDS, use_cache=cache)
    found = decode_target(mine, PROMPTS, decoding, CPU, start=0)
    assert found == written(theirs)
    assert any(len(set(row)) > 1 for row in found) and len({len(row) for row in found}) > 1


def test_the_encoder_runs_once(pair: tuple[Any, Any]) -> None:
    _, mine = pair
    calls: list[str] = []
    hooks = [
        block.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, block in (("encoder", mine.encoder.layers[0].block), ("decoder", mine.decoder.layers[0].block))
    ]
    rows = decode_target(mine, PROMPTS[:1], Decoding(max_new_tokens=7), CPU, start=0)
    for hook in hooks:
        hook.remove()
    assert calls == ["encoder"] + ["decoder"] * len(rows[0]) and len(rows[0]) == 7


def test_a_sampled_answer_is_the_same_alone_and_among_others(pair: tuple[Any, Any]) -> None:
    _, mine = pair
    decoding = Decoding(max_new_tokens=10, end_tokens=(1,), temperature=1.0, top_k=20, seed=4)
    together = decode_target(mine, PROMPTS, decoding, CPU, start=0)
    assert together == [decode_target(mine, [p], decoding, CPU, start=0)[0] for p in PROMPTS]
    assert together != decode_target(mine, PROMPTS, Decoding(10, end_tokens=(1,), temperature=1.0, seed=5), CPU, start=0)


def test_what_does_not_fit_is_refused() -> None:
    model = T5(vocab_size=9, hidden_size=8, num_attention_heads=2, hidden_layers=1).eval()
    with pytest.raises(ConfigError, match="max_length=1"):
        decode_target(model, [[3]], Decoding(max_length=1), CPU, start=0)
    with pytest.raises(ConfigError, match="at most 4 new tokens fit"):
        decode_target(model, [[3]], Decoding(max_new_tokens=5, max_length=5), CPU, start=0)
    with pytest.raises(ConfigError, match="no tokens"):
        decode_target(model, [[3], []], Decoding(), CPU, start=0)


def answered(layout: dict[str, Any], sampled: bool) -> list[list[int]]:
    from dufu.optim import get_default_optimizer_params
    from dufu.parallel.build import distribute
    from dufu.parallel.layout import ParallelLayout
    from dufu.parallel.process import choose_device, join

    def make() -> T5:
        return T5(
            vocab_size=99, hidden_layers=2, decoder_layers=2, hidden_size=32, num_attention_heads=4, initializer_factor=2.0
        )  # fmt: skip

    d = distribute(make, join(ParallelLayout(**layout), choose_device("cpu")), get_default_optimizer_params, seed=5)
    d.model.eval()
    assert layout.get("tensor", 1) * d.model.encoder.layers[0].block.attention.output.weight.shape[1] == 32 or layout.get(
        "zero_stage"
    )
    decoding = Decoding(max_new_tokens=9, end_tokens=(17, 40, 41, 42), temperature=float(sampled), seed=3)
    return decode_target(d.model, PROMPTS, decoding, CPU, start=0, forward=d.runner.forward_everywhere)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}, {"zero_stage": 3, "data": 2},
                                    {"tensor": 2, "sequence": True}], ids=str)  # fmt: skip
def test_answers_are_the_same_in_every_layout(layout: dict[str, Any], ranks: Ranks) -> None:
    size = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("data", 1)
    for sampled in (False, True):
        one = ranks(1, answered, {}, sampled)[0]
        assert all(found == one for found in ranks(size, answered, layout, sampled))
        assert len({len(row) for row in one}) > 1 or not sampled  # rows end at different times


def test_a_prompt_is_read_with_what_its_tokenizer_puts_around_it(tmp_path: Path) -> None:
    from tokenizers import processors

    from dufu.data.tokenizer import byte_tokenizer
    from dufu.generation.seq2seq import encode_source, first_token

    tokenizer = byte_tokenizer()
    assert encode_source(tokenizer, "ab") == [97, 98, 256] and encode_source(tokenizer, "") == []
    tokenizer.tokenizer.post_processor = processors.TemplateProcessing(single="<|cls|> $A <|sep|>",
                                                                       special_tokens=[("<|cls|>", 258), ("<|sep|>", 259)])  # fmt: skip
    assert encode_source(tokenizer, "ab") == [258, 97, 98, 259]
    model = T5(vocab_size=9, hidden_size=8, num_attention_heads=2, hidden_layers=1)
    assert first_token(model, tokenizer) == 257
