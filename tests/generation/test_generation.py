"""Generated text depends on the weights, the prompt and the seed: not on the cache, the batch, or the number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.errors import ConfigError, DufuError
from dufu.generation import Decoding, TextGenerationPipeline, decode
from dufu.generation.sampling import draw, keep_top_k, keep_top_p, penalise_repetition, row_keys
from dufu.training.run import train
from tests.pool import Ranks
from tests.small import TINY, dufu, metrics

PROMPTS = ["The ", "A class definition", "x", "Names refer to"]
SAMPLED: dict[str, Any] = {
    "max_new_tokens": 6,
    "temperature": 1.0,
    "top_k": 30,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
    "seed": 3,
}


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generation") / "run"
    train("gpt2_tiny", [*TINY, "optim.lr=0.01", "train.train_iter=30", f"train.output_dir={folder}"], data=[str(corpus)])
    return folder


@pytest.fixture(scope="module")
def pipeline(run: Path) -> TextGenerationPipeline:
    return TextGenerationPipeline(run)


@pytest.mark.parametrize("settings", [{"max_new_tokens": 6}, SAMPLED], ids=["greedy", "sampled"])
def test_same_text_alone_in_a_batch_and_without_cache(pipeline: TextGenerationPipeline, settings: dict[str, Any]) -> None:
    together = [r.tokens for r in pipeline(PROMPTS, **settings)]
    alone = [pipeline(p, **settings)[0].tokens for p in PROMPTS]
    uncached = [r.tokens for r in pipeline(PROMPTS, use_cache=False, **settings)]
    assert together == alone == uncached
    assert settings is not SAMPLED or len({tuple(t) for t in together}) > 1  # the prompts matter


def test_scores_of_a_padded_row_equal_its_own(pipeline: TextGenerationPipeline) -> None:
    model, tokenizer = pipeline.loaded.distributed.model, pipeline.loaded.tokenizer
    from dufu.models.chain import Batch

    short, long = tokenizer.encode("xy"), tokenizer.encode("Names ref")
    padded = torch.tensor([[0] * (len(long) - len(short)) + short, long])
    real = torch.tensor([[False] * (len(long) - len(short)) + [True] * len(short), [True] * len(long)])
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        together = model(Batch(padded, positions=positions, padding=real))
        alone = model(Batch(torch.tensor([short])))
    assert torch.isfinite(together).all()
    # other lengths sum in another order
    torch.testing.assert_close(together[0, -len(short) :], alone[0], atol=1e-4, rtol=1e-4)


def test_equal_prompts_are_sampled_differently_and_seeds_matter(pipeline: TextGenerationPipeline) -> None:
    twice = pipeline(["The ", "The "], **SAMPLED)
    assert twice[0].tokens != twice[1].tokens
    assert pipeline(["The ", "The "], **SAMPLED) == twice
    assert pipeline("The ", **{**SAMPLED, "seed": 4})[0].tokens != twice[0].tokens


def generated(run: str, overrides: list[str], settings: dict[str, Any]) -> list[list[int]]:
    pipeline = TextGenerationPipeline(run, overrides)
    weight = pipeline.loaded.distributed.model.layers[0].block.mlp.expand.weight
    assert weight.shape[0] * pipeline.loaded.processes.tensor.size == 64
    elsewhere = [i for i in pipeline.loaded.distributed.infos if i.parameter.is_meta]
    assert bool(elsewhere) == (pipeline.loaded.processes.pipeline.size > 1)
    return [r.tokens for r in pipeline(PROMPTS, **settings)]


@pytest.mark.parametrize("settings", [{"max_new_tokens": 6}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "overrides", [[], ["train.dist.tensor_parallel_size=2"], ["train.dist.pipeline_parallel_size=2"]], ids=["dp2", "tp2", "pp2"]
)
def test_same_text_on_two_processes(
    pipeline: TextGenerationPipeline, run: Path, ranks: Ranks, overrides: list[str], settings: dict[str, Any]
) -> None:
    expected = [r.tokens for r in pipeline(PROMPTS, **settings)]
    assert ranks(2, generated, str(run), overrides, settings) == [expected, expected]


def test_each_row_ends_by_itself_at_any_of_several_end_tokens(pipeline: TextGenerationPipeline) -> None:
    sampled = {**SAMPLED, "end_tokens": (260,)}
    free = [r.tokens for r in pipeline(PROMPTS, **sampled)]
    ends = (free[0][2], free[1][4])
    rows = [r.tokens for r in pipeline(PROMPTS, **{**sampled, "end_tokens": ends})]
    for whole, row in zip(free, rows):
        stop = min((whole.index(e) for e in ends if e in whole), default=len(whole))
        assert row == whole[:stop]
    kept = [r.tokens for r in pipeline(PROMPTS, **{**sampled, "end_tokens": ends, "min_new_tokens": 5})]
    assert all(len(row) >= 5 for row in kept)


def test_no_row_prefers_greedy_differently_at_tiny_temperatures(pipeline: TextGenerationPipeline) -> None:
    greedy = [r.tokens for r in pipeline(PROMPTS, max_new_tokens=5)]
    for temperature in (1e-4, 1e-8):
        assert [r.tokens for r in pipeline(PROMPTS, max_new_tokens=5, temperature=temperature)] == greedy


def test_repetition_penalty_lowers_negative_scores_too() -> None:
    scores = torch.tensor([[2.0, -2.0, 1.0]])
    tokens, real = torch.tensor([[0, 1, 2]]), torch.tensor([[True, True, False]])
    assert penalise_repetition(scores, tokens, real, 2.0).tolist() == [[1.0, -4.0, 1.0]]


def test_filters_keep_what_they_say() -> None:
    scores = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert keep_top_k(scores, 2).isfinite().tolist() == [[True, True, False, False]]
    assert keep_top_p(scores, 0.7).isfinite().tolist() == [[True, True, False, False]]
    assert keep_top_p(scores, 0.01).isfinite().tolist() == [[True, False, False, False]]
    assert keep_top_p(scores, 1.0).isfinite().all()


def test_without_a_limit_each_row_has_the_room_of_its_own_prompt(pipeline: TextGenerationPipeline) -> None:
    prompts = ["x", "The value of the exp"]
    for use_cache in (True, False):
        together = [r.tokens for r in pipeline(prompts, use_cache=use_cache, end_tokens=(260,))]
        assert together == [pipeline(p, end_tokens=(260,))[0].tokens for p in prompts]
        assert [len(t) for t in together] == [23, 4]  # of 24 positions


def test_sharded_weights_generate_the_same(pipeline: TextGenerationPipeline, run: Path, ranks: Ranks) -> None:
    zero3 = ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"]
    prompts = [*PROMPTS, "one more"]
    expected = [r.tokens for r in pipeline(prompts, **SAMPLED)]
    assert ranks(2, sharded, str(run), zero3, prompts) == [expected, expected]


def sharded(run: str, overrides: list[str], prompts: list[str]) -> list[list[int]]:
    pipeline = TextGenerationPipeline(run, overrides)
    store = pipeline.loaded.distributed.store
    assert store.sharded and not any(flat.resident for flat in store.flats)
    return [r.tokens for r in pipeline(prompts, **SAMPLED)]


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.6, 0.3, 0.1])
    keys = row_keys(1, [[n] for n in range(20000)], [0] * 20000, torch.device("cpu"))
    drawn = draw(probabilities.log().expand(20000, 3), keys, 0).bincount(minlength=3) / 20000
    torch.testing.assert_close(drawn, probabilities, atol=0.012, rtol=0)  # three standard deviations


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 100}, "20 new tokens fit"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temprature": 1.0}, 'did you mean "temperature"'),
        ({"end_tokens": (99999,)}, "end_tokens=99999"),
        ({"min_new_tokens": 50}, "min_new_tokens=50"),
    ],
)
def test_bad_settings_are_one_clear_error(pipeline: TextGenerationPipeline, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline("The ", **settings)
    with pytest.raises(DufuError, match="no tokens"):
        pipeline("", max_new_tokens=2)


def test_decode_of_no_prompts_is_nothing(pipeline: TextGenerationPipeline) -> None:
    assert decode(pipeline.loaded.distributed.model, [], Decoding(), torch.device("cpu")) == []


def test_the_command_line_prints_and_refuses(run: Path, tmp_path: Path) -> None:
    done = dufu("generate", str(run), "--prompt", "The ", "--max-new-tokens", "4", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["prompt"] == "The "
    missing = dufu("generate", str(tmp_path / "nothing"), "--prompt", "x")
    assert missing.returncode == 2 and missing.stderr.startswith("error:") and missing.stderr.count("\n") == 1
    evaluated = dufu("eval", str(run), "--json")
    assert evaluated.returncode == 0 and json.loads(evaluated.stdout)["loss"] > 0


def live(folder: str, corpus: str, overrides: list[str], resume: bool = False) -> None:
    prompts = (
        "[{_target_: sample_text, prompts: ['The ', 'Names refer to'], period: 2, max_new_tokens: 6, temperature: 1.0, top_k: 30}]"
    )
    given = [
        *TINY,
        "optim.lr=0.01",
        "train.num_accumulation_steps=2",
        f"train.hooks={prompts}",
        f"train.output_dir={folder}",
        *overrides,
    ]
    train("gpt2_tiny", given, data=[corpus], resume=resume)


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (4, ["train.dist.pipeline_parallel_size=2", "train.dist.tensor_parallel_size=2"]),
        (4, ["train.dist.pipeline_parallel_size=2", "train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"]),
        (4, ["train.dist.tensor_parallel_size=2", "train.dist.sequence_parallel=true", "train.dist.context_parallel_size=2"]),
    ],
    ids=["tp2xpp2", "zero3xpp2", "sp2xcp2"],
)
def test_text_sampled_while_training_is_that_of_one_process(
    size: int, overrides: list[str], ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    ranks(1, live, str(tmp_path / "one"), str(corpus), [])
    ranks(size, live, str(tmp_path / "many"), str(corpus), [*overrides, "train.stop_at_step=3"])
    ranks(size, live, str(tmp_path / "many"), str(corpus), overrides, True)
    one, many = ((tmp_path / name / "samples.jsonl").read_text().splitlines() for name in ("one", "many"))
    assert [json.loads(line)["step"] for line in one] == [2, 4, 6]
    assert one == many and len(json.loads(one[0])["texts"]) == 2


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("prompts: ['Names']", "prompt 'Names': a prompt of 5 tokens and max_new_tokens=40 exceed the 24 positions; at most 19"),
        ("prompts: ['Fits', '0123456789012345678901234'], max_new_tokens: 1", "has 25 tokens, but at most 23 leave room"),
        ("prompts: [''], max_new_tokens: 1", "prompt '' has no tokens"),
    ],
)
def test_prompts_that_could_not_be_continued_are_refused_before_any_step(
    hook: str, message: str, corpus: Path, tmp_path: Path
) -> None:
    given = [*TINY, f"train.hooks=[{{_target_: sample_text, {hook}, period: 2}}]", f"train.output_dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=message):
        train("gpt2_tiny", given, data=[str(corpus)])
    assert not metrics(tmp_path / "run")
