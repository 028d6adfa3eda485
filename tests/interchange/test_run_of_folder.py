"""A Hugging Face folder trained, evaluated and continued in any layout, and what comes out opened by transformers again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dufu.errors import CheckpointError, ConfigError
from dufu.interchange.export import size_of
from dufu.training.export_hf import export_folder
from tests.interchange.made import make, texts
from tests.interchange.targets import generated, scores, trained
from tests.pool import Ranks
from tests.small import metrics

transformers = pytest.importorskip("transformers")

LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["train.dist.tensor_parallel_size=2"]),
    "pp2": (2, ["train.dist.pipeline_parallel_size=2"]),
    "zero3": (2, ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"]),
    "tp2xpp2": (4, ["train.dist.tensor_parallel_size=2", "train.dist.pipeline_parallel_size=2"]),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    base = tmp_path_factory.mktemp("folders")
    return {kind: (base / kind, make(base / kind, kind)) for kind in ("gpt2", "llama", "bert")}


IDS = torch.randint(0, 250, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_scores_are_transformers_own_in_every_layout(kind: str, layout: str, folders: Any, ranks: Ranks) -> None:
    folder, theirs = folders[kind]
    size, overrides = LAYOUTS[layout]
    with torch.no_grad():
        expected = theirs(IDS).logits
    results = ranks(size, scores, str(folder), overrides, IDS.tolist())
    total = sum(parameter.numel() for parameter in theirs.parameters())
    for found, held in results:
        assert (found - expected).abs().max() < 1e-5
        if size > 1 and layout != "zero3":  # of what is only run, ZeRO divides nothing
            assert sum(count for _, count in held) < 0.8 * total


@pytest.mark.parametrize("layout", ["one", "tp2xpp2"])
def test_text_is_transformers_own(layout: str, folders: Any, ranks: Ranks) -> None:
    folder, theirs = folders["llama"]
    size, overrides = LAYOUTS[layout]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in texts():
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        out = theirs.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
        expected.append([token for token in out if token not in (theirs.config.eos_token_id, theirs.config.pad_token_id)])
    for found in ranks(size, generated, str(folder), overrides, texts()):
        assert found == expected


def test_training_in_two_layouts_gives_the_same_losses_and_a_folder_that_opens(
    folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    folder, theirs = folders["llama"]
    for layout in ("one", "tp2xpp2"):
        size, overrides = LAYOUTS[layout]
        ranks(size, trained, str(folder), str(corpus), str(tmp_path / layout), overrides)
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "tp2xpp2")
    assert len(one) == 3
    assert all(abs(a["loss"] - b["loss"]) < 1e-6 * a["loss"] for a, b in zip(one, two))
    for layout in ("one", "tp2xpp2"):
        export_folder(tmp_path / layout, tmp_path / f"{layout}-out", largest=40_000)
    models = {}
    for name in ("one-out", "tp2xpp2-out"):
        opened, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(said.values())
        models[name] = opened
    with torch.no_grad():
        one_scores, two_scores = (model(IDS).logits for model in models.values())
        moved = (one_scores - theirs(IDS).logits).abs().max()
    assert (one_scores - two_scores).abs().max() < 2e-5 < moved
    (here, _), *_ = ranks(1, scores, str(tmp_path / "one"), [], IDS.tolist())
    assert (here - one_scores).abs().max() < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "one-out")
    assert tokenizer.decode(tokenizer("Hello")["input_ids"]) == "Hello"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_there_and_back_every_tensor_has_the_same_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Fault B119: the file's type is the type that config.json names, before and after."""
    make(tmp_path / "in", kind, dtype=dtype)
    done = export_folder(tmp_path / "in", tmp_path / "out", largest=size_of("20KB"))
    before: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    for folder, into in ((tmp_path / "in", before), (tmp_path / "out", after)):
        for path in folder.glob("model*.safetensors"):
            into.update(load_file(path))
    assert len(list((tmp_path / "out").glob("model-*"))) > 1
    assert set(before) == set(after)
    assert all(value.dtype == dtype and torch.equal(value, after[name]) for name, value in before.items())
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    original = json.loads((tmp_path / "in" / "config.json").read_text())
    assert fields["dtype"] == done.dtype == str(dtype).removeprefix("torch.")
    assert {name: fields[name] for name in original} == {**original, "dtype": done.dtype}


def test_a_changed_setting_shows_after_export(tmp_path: Path, ranks: Ranks) -> None:
    """Fault B117: what shapes the numbers is carried over, however unusual."""
    unusual = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 0.05, "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }  # fmt: skip
    theirs = make(tmp_path / "in", "llama", **unusual)
    export_folder(tmp_path / "in", tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.randint(0, 250, (1, 60))
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, again(ids).logits)
    (found, _), *_ = ranks(1, scores, str(tmp_path / "out"), [], ids.tolist())
    assert (found - theirs(ids).logits).abs().max() < 1e-5


def test_a_value_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "in", "llama", shards="5GB")
    state = load_file(tmp_path / "in" / "model.safetensors")
    state["model.norm.weight"][0] = 1e6
    from safetensors.torch import save_file

    save_file(state, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"head\.norm\.weight holds a value beyond what float16"):
        export_folder(tmp_path / "in", tmp_path / "out", "float16")
    assert not list(tmp_path.glob("*out*"))


def test_nothing_is_written_over_something_else(tmp_path: Path) -> None:
    make(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(ConfigError, match="exists already"):
        export_folder(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_a_new_head_needs_permission(folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """A pre-trained BERT becomes a classifier: its new head begins anew, what it lacks and has too much is listed otherwise."""
    folder, _ = folders["bert"]
    arguments = [f"{folder}:BertForSequenceClassification", str(corpus), str(tmp_path / "run")]
    own = ["dataloader.dataset._target_=tests.interchange.targets.Judged"]
    with pytest.raises(AssertionError) as caught:
        ranks(1, trained, *arguments, own)
    assert all(
        name in str(caught.value) for name in ("missing classifier.weight", "missing bert.pooler.dense.weight", "unexpected cls.")
    )
    allowed = ["train.allow_missing=[classifier,bert.pooler]", "train.allow_unexpected=[cls]"]
    ranks(1, trained, *arguments, [*own, *allowed])
    assert "begin anew" in (tmp_path / "run" / "log.txt").read_text()
    assert len(metrics(tmp_path / "run")) == 3


def resumed(folder: str) -> None:
    from dufu.training.run import train

    train(folder, ["train.stop_at_step=null"], resume=True)


def test_a_run_goes_on_when_the_folder_is_gone(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """Its path may hold whatever a path may hold."""
    folder = tmp_path / "模型:v1=x"
    make(folder, "gpt2")
    ranks(1, trained, str(folder), str(corpus), str(tmp_path / "whole"), [])
    ranks(1, trained, str(folder), str(corpus), str(tmp_path / "run"), ["train.stop_at_step=1"])
    folder.rename(tmp_path / "elsewhere")
    ranks(2, resumed, str(tmp_path / "run"))
    one, two = metrics(tmp_path / "whole"), metrics(tmp_path / "run")
    assert len(one) == len(two) == 3
    assert all(abs(a["loss"] - b["loss"]) < 1e-6 * a["loss"] for a, b in zip(one, two))
    done = export_folder(tmp_path / "run", tmp_path / "out")
    assert done.step == 3
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("Hi")["input_ids"]


def test_a_prompt_begins_as_the_folders_tokenizer_begins_it(tmp_path: Path, ranks: Ranks) -> None:
    """A token that begins every text, as Llama's tokenizers put it there, is part of what the model was trained on."""
    from tokenizers import Tokenizer, processors

    theirs = make(tmp_path / "in", "llama")
    tokenizer = Tokenizer.from_file(str(tmp_path / "in" / "tokenizer.json"))
    name = "<|endoftext|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, tokenizer.token_to_id(name))]
    )
    tokenizer.save(str(tmp_path / "in" / "tokenizer.json"))
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")("layout", return_tensors="pt")["input_ids"]
    assert ids[0, 0] == tokenizer.token_to_id(name) and ids.shape[1] == 7
    expected = theirs.generate(ids, max_new_tokens=6, do_sample=False)[0, 7:].tolist()
    (found,) = ranks(1, generated, str(tmp_path / "in"), [], ["layout"])
    assert found == [expected]


@pytest.mark.parametrize("named", ["LlamaForSequenceClassification", "Foo"])
def test_a_class_that_is_not_built_is_refused_by_name(named: str, folders: Any) -> None:
    from dufu.models.hf import describe_folder

    with pytest.raises(CheckpointError, match=f"architectures={named} is not built; LlamaForCausalLM is"):
        describe_folder(folders["llama"][0], named)
    assert describe_folder(folders["llama"][0], "LlamaModel").target == "dufu.models.llama.Llama"


def test_heads_that_published_folders_hold_besides_are_left_out_and_named(tmp_path: Path) -> None:
    """The folders of BERT's first models name the masked-word class and hold the pooler and the sentence head too."""
    make(tmp_path / "in", "bert", shards="5GB")
    path = tmp_path / "in" / "model.safetensors"
    extra = {
        "bert.pooler.dense.weight": torch.ones(32, 32),
        "bert.pooler.dense.bias": torch.ones(32),
        "cls.seq_relationship.bias": torch.ones(2),
    }
    from safetensors.torch import save_file

    save_file({**load_file(path), **extra}, path, {"format": "pt"})
    done = export_folder(tmp_path / "in", tmp_path / "out")
    assert all(name in done.left_out for name in extra)
    assert not set(extra) & set(load_file(tmp_path / "out" / "model.safetensors"))


def test_nothing_is_written_into_what_is_read(tmp_path: Path) -> None:
    make(tmp_path / "in")
    with pytest.raises(ConfigError, match="lies within"):
        export_folder(tmp_path / "in", tmp_path / "in" / "out")


def test_samples_that_the_model_cannot_take_leave_no_folder_behind(
    folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    folder, _ = folders["bert"]
    with pytest.raises(AssertionError, match="sentence_labels"):
        ranks(
            1,
            trained,
            f"{folder}:BertForPreTraining",
            str(corpus),
            str(tmp_path / "run"),
            ["train.allow_missing=[bert.pooler,cls.seq_relationship]"],
        )
    assert not (tmp_path / "run").exists()
