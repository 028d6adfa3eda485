"""An unmodified transformers model in a recipe: its own numbers, in every layout, from its folder and into one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.errors import CheckpointError, ConfigError, DufuError, LayoutError, NotBuiltError
from dufu.models import Batch, HuggingFace
from dufu.models.huggingface import OutsideModel
from dufu.models.huggingface.hf import table_of
from dufu.parallel.layout import ParallelLayout, check_model
from tests.models.outside_models import MODELS, batch_of, make
from tests.pool import Ranks
from tests.small import metrics

ALL = os.environ.get("DUFU_MODELS") == "all"
TRAINED = [name for name in MODELS if not name.startswith(("T5", "ViT"))]
CHAINS = (
    [*TRAINED]
    if ALL
    else ["LlamaForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "BertForSequenceClassification"]
)

SETTINGS = [
    "train.global_batch_size=8", "train.train_iter=5", "train.log_period=1", "train.tensorboard=false", "train.checkpointer.period=3",
    "train.evaluation.eval_period=3", "train.evaluation.eval_iter=2", "dataloader.dataset.sequence_length=16", "optim.lr=1e-2",
    "tokenization.tokenizer=bytes",
]  # fmt: skip
PIPELINE = ["train.dist.pipeline_parallel_size=2", "train.num_accumulation_steps=2", "train.train_micro_batch_size=null"]
TENSOR = ["train.dist.tensor_parallel_size=2"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp2": (2, []),
    "tp2": (2, TENSOR),
    "pp2": (2, PIPELINE),
    "zero3": (2, ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"]),
    "zero1": (2, ["train.zero_optimization.enabled=true"]),
    "recompute": (1, ["train.activation_checkpoint.enabled=true"]),
    "selective": (1, ["train.activation_checkpoint.enabled=true", "train.activation_checkpoint.mode=selective"]),
    "tp2xpp2": (4, [*TENSOR, *PIPELINE]),
}
QUICK = [("LlamaForCausalLM", "tp2"), ("LlamaForCausalLM", "pp2"), ("LlamaForCausalLM", "zero3"), ("LlamaForCausalLM", "recompute"),
         ("BertForMaskedLM", "dp2"), ("BertForMaskedLM", "tp2"), ("BertForMaskedLM", "pp2")]  # fmt: skip
FULL = [
    (name, layout) for name in ("LlamaForCausalLM", "BertForMaskedLM", "GPT2LMHeadModel", "Gemma2ForCausalLM") for layout in LAYOUTS
]


def pretrain(folder: str, out: str, corpus: str, overrides: list[str], **options: Any) -> dict[str, Any]:
    """Train a folder's model by a recipe on this rank; return what shows that the work was divided."""
    from dufu.training.effective import read_config
    from dufu.training.hooks import Hook
    from dufu.training.run import train

    class Witness(Hook):
        seen: dict[str, Any] = {}  # noqa: RUF012

        def after_step(self, trainer: Any) -> None:
            store = trainer.train_step.distributed.store
            self.seen = {"held": sum(e.tensor.numel() for e in store.entries), "names": [i.name for i in store.infos]}

    config = read_config("bert_tiny" if "Bert" in folder else "gpt2_tiny")
    config.model = {"_target_": "dufu.models.HuggingFace", "folder": folder}
    witness = Witness()
    train(config, [*SETTINGS, f"train.output_dir={out}", *overrides], data=[corpus], hooks=[witness], **options)
    return witness.seen


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders that transformers wrote."""
    base = tmp_path_factory.mktemp("folders")

    def folder(name: str) -> Path:
        if not (base / name).is_dir():
            length = "n_positions" if "GPT2" in name else "max_position_embeddings"
            make(name, vocab_size=300, **{length: 64}).save_pretrained(base / name)
        return base / name

    return folder


@pytest.fixture(scope="module")
def one(folders: Any, ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model's run in one process: its folder, and what the process held."""
    base = tmp_path_factory.mktemp("one")
    known: dict[str, tuple[Path, dict[str, Any]]] = {}

    def run(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in known:
            known[name] = base / name, ranks(1, pretrain, str(folders(name)), str(base / name), str(corpus), [])[0]
        return known[name]

    return run


@pytest.mark.parametrize("name", CHAINS)
def test_the_chain_gives_the_models_own_scores(name: str) -> None:
    network = make(name).eval()
    batch = batch_of(name)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 7:] = 0
    with torch.no_grad():
        theirs = network(input_ids=batch["input_ids"], attention_mask=mask).logits
        model = OutsideModel(network).eval()
        ours = model(Batch(batch["input_ids"], padding=mask.bool()))
    assert model.outline is not None and len(model.units()) == 5
    real = mask.bool() if ours.dim() == 3 else ...
    assert torch.equal(ours[real], theirs[real])  # the same operations


@pytest.mark.parametrize("name", CHAINS)
def test_loss_and_gradients_are_the_models_own(name: str) -> None:
    network = make(name).eval()
    batch = batch_of(name)
    loss = network(**batch).loss
    loss.backward()
    theirs = {n: p.grad.clone() for n, p in network.named_parameters()}
    network.zero_grad()
    model = OutsideModel(network).eval()
    labels = batch["labels"]
    if model.by_sample:
        sums = model(Batch(batch["input_ids"], extra={"sentence_labels": labels}))
    else:
        if model.causal:
            labels = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], -100)), 1)
        sums = model(Batch(batch["input_ids"], labels))
    mean = sums["loss"] / sums[model.objectives["loss"]]
    mean.backward()
    assert mean.item() == pytest.approx(loss.item(), rel=1e-6)
    assert set(theirs) == {n for n, _ in model.named_parameters()}  # names are the model's own
    for n, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[n], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "layout"), FULL if ALL else QUICK)
def test_training_equals_one_process(
    name: str, layout: str, one: Any, folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    size, overrides = LAYOUTS[layout]
    folder, whole = one(name)
    parts = ranks(size, pretrain, str(folders(name)), str(tmp_path / "run"), str(corpus), overrides)
    for mine, alone in zip(metrics(tmp_path / "run"), metrics(folder)):
        assert mine["loss"] == pytest.approx(alone["loss"], rel=1e-5)  # fp32 sums in another order
        assert mine["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
        assert mine["tokens"] == alone["tokens"]
    for mine, alone in zip(metrics(tmp_path / "run", "valid"), metrics(folder, "valid")):
        assert mine["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    if size > 1 and layout != "dp2":
        assert all(part["held"] < 0.8 * whole["held"] for part in parts)


def test_a_seeded_change_of_the_folder_turns_it_red(one: Any, folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """The runs that are compared do begin with the folder's weights."""
    name = "LlamaForCausalLM"
    network = make(name, vocab_size=300, max_position_embeddings=64)
    with torch.no_grad():
        network.model.norm.weight[0] += 0.1
    network.save_pretrained(tmp_path / name)
    ranks(1, pretrain, str(tmp_path / name), str(tmp_path / "run"), str(corpus), ["train.train_iter=1"])
    assert metrics(tmp_path / "run")[0]["loss"] != pytest.approx(metrics(one(name)[0])[0]["loss"], rel=1e-5)


def test_a_run_goes_on_exactly_in_another_layout(one: Any, folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    name, out = "LlamaForCausalLM", str(tmp_path / "run")
    ranks(2, pretrain, str(folders(name)), out, str(corpus), [*TENSOR, "train.stop_at_step=3"])
    ranks(2, resumed, str(folders(name)), out, str(corpus), PIPELINE)
    assert [r["loss"] for r in metrics(out)] == pytest.approx([r["loss"] for r in metrics(one(name)[0])], rel=1e-5)


def resumed(folder: str, out: str, corpus: str, overrides: list[str]) -> None:
    pretrain(folder, out, corpus, overrides, resume=True)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_a_run_is_evaluated_and_exported_to_a_folder_that_transformers_opens(name: str, one: Any, tmp_path: Path) -> None:
    import transformers

    import dufu
    from dufu.training.export_hf import export_folder

    folder, _ = one(name)
    loaded = dufu.load(folder)
    export_folder(folder, tmp_path / "out")
    opened, info = getattr(transformers, name).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(loaded.distributed.model(Batch(ids)), opened.eval()(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    assert opened.config.attention_dropout == 0.2 if "Llama" in name else opened.config.hidden_dropout_prob == 0.1


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_dufu_check_proves_an_unmodified_model(name: str, ranks: Ranks) -> None:
    import dufu

    batch = {key: value.clone() for key, value in batch_of(name).items()}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, 7:] = 0
    batch["labels"][1, 7:] = -100
    report = dufu.check(make(name), batch, "dp2,tp2,zero3", steps=2, pool=ranks.pool)
    assert report and len(report.findings) == 3


def test_dufu_check_proves_a_recipe_with_an_unmodified_model(folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    import dufu

    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from dufu.config import LazyCall, get_config\n"
        f'model = LazyCall("dufu.models.HuggingFace")(folder="{folders("LlamaForCausalLM")}")\n'
        'optim, train = get_config("common/optim.py").optim, get_config("common/train.py").train\n'
        'dataloader = get_config("common/data/gpt_dataset.py").dataloader\n'
    )
    report = dufu.check(recipe, layouts="tp2,pp2", overrides=SETTINGS, data=[str(corpus)], steps=2, pool=ranks.pool)
    assert report


def test_what_passes_from_block_to_block_makes_no_chain() -> None:
    from transformers import AlbertConfig, AlbertForMaskedLM

    shared = OutsideModel(
        AlbertForMaskedLM(
            AlbertConfig(vocab_size=67, embedding_size=8, hidden_size=16, intermediate_size=16, num_attention_heads=2)
        )
    )
    assert list(shared.units()) == ["model"]
    with pytest.raises(
        LayoutError, match="pipeline_parallel_size=2: AlbertForMaskedLM has no list of blocks, so its blocks form no chain"
    ):
        check_model(shared, ParallelLayout(pipeline=2))


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"context": 2}, "train.dist.context_parallel_size: an unmodified LlamaForCausalLM has whole samples on each process"),
        ({"tensor": 2, "sequence": True}, "train.dist.sequence_parallel: an unmodified LlamaForCausalLM"),
        ({"expert": 2, "data": 2}, "train.dist.expert_parallel_size=2: an unmodified"),
        ({"tensor": 4}, "2 key-value heads do not divide over tensor_parallel_size=4; the nearest size that fits is 2"),
    ],
)
def test_a_layout_that_it_cannot_have_is_refused_by_name(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        check_model(OutsideModel(make("LlamaForCausalLM")), ParallelLayout(**layout))


def test_experts_of_transformers_are_not_divided_by_tensor() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    small = MixtralConfig(vocab_size=67, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                          num_key_value_heads=2)  # fmt: skip
    mixture = OutsideModel(MixtralForCausalLM(small))
    with pytest.raises(LayoutError, match=r"divides model.layers.0.mlp.experts .* which dufu does not"):
        check_model(mixture, ParallelLayout(tensor=2))
    with pytest.raises(NotBuiltError, match="in another form, which transformers puts together when it reads"):
        table_of(mixture.network)


def test_what_a_folder_cannot_be_is_one_line(folders: Any, tmp_path: Path) -> None:
    folder = folders("LlamaForCausalLM")
    cases: list[tuple[type[DufuError], str, dict[str, Any]]] = [
        (CheckpointError, "is no Hugging Face folder", {"folder": str(tmp_path)}),
        (ConfigError, "transformers has no model class Nonsense", {"folder": str(folder), "architecture": "Nonsense"}),
        (ConfigError, "takes a BertConfig", {"folder": str(folder), "architecture": "BertForMaskedLM"}),
        (ConfigError, "model.cfg.config.attention_drop: LlamaConfig has no such field", {"folder": str(folder), "config": {"attention_drop": 0}}),
        (ConfigError, "the model has 300 words, the tokenizer 301", {"folder": str(folder), "vocab_size": 301}),
        (NotBuiltError, "LlamaModel: its objective is not built", {"folder": str(folder), "architecture": "LlamaModel"}),
    ]  # fmt: skip
    for kind, said, arguments in cases:
        with pytest.raises(kind, match=said):
            HuggingFace(**arguments)


def test_generation_is_not_built_and_says_so() -> None:
    with pytest.raises(NotBuiltError, match="generation from an unmodified transformers model is not built"):
        OutsideModel(make("LlamaForCausalLM"))(Batch(torch.ones(1, 2, dtype=torch.int64), caches=[]))


def test_code_that_a_folder_brings_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "architectures": ["Mine"], "auto_map": {"AutoConfig": "mine.Mine"}}'
    )
    (tmp_path / "mine.py").write_text(f'open("{tmp_path}/ran", "w")\n')
    with pytest.raises(CheckpointError, match="transformers does not take it"):
        HuggingFace(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_weights_of_another_model_are_refused_with_their_names(folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folders("LlamaForCausalLM"), tmp_path / "Llama")
    config = tmp_path / "Llama" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(AssertionError, match=r"missing model.layers.3.self_attn.q_proj.weight"):
        ranks(1, pretrain, str(tmp_path / "Llama"), str(tmp_path / "run"), str(corpus), [])
