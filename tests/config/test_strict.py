"""An unknown, misplaced or wrongly typed key is one line that says where it belongs; two places that disagree show both values."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dufu.cli.main import run
from dufu.config import LazyConfig, get_config
from dufu.config.schema import section_paths
from dufu.errors import ConfigError, NotBuiltError
from dufu.training.batch_size import plan_batch
from dufu.training.effective import effective_config, refuse_unbuilt

WRONG = [
    ("learning_rte=1", r'no section "learning_rte"; did you mean "optim\.lr"'),
    ("train.learning_rte=1", r'train has no key "learning_rte"; did you mean "optim\.lr"'),
    ("train.num-epochs=3", r'train has no key "num-epochs"; did you mean "train\.train_epoch"'),
    ("train.lr=1", '"lr" belongs to optim'),
    ("optim.seed=3", '"seed" belongs to train'),
    ("train.hidden_size=3", r'"hidden_size" belongs to model\.cfg'),
    ("optim.clip_grad_norm=1", r'"clip_grad_norm" belongs to optim\.params'),
    ("train.dist.tensor_parallel=2", 'did you mean "tensor_parallel_size"'),
    ("tran.seed=2", 'no section "tran"; did you mean "train"'),
    ("model.cfg.hidden_sise=3", r'model\.cfg has no key "hidden_sise"; did you mean "hidden_size"'),
    ("train.seed=x", r"train\.seed='x': expected a whole number"),
    ("train.amp=3", r"train\.amp=3: expected a section with keys"),
    ("train.amp.level=O5", "one of O0, O1, O2, O3"),
    ("optim.lr=abc", r"optim\.lr='abc': expected a number"),
    ("optim.betas=[0.9]", "expected a list of 2"),
    ("dataloader.data=a.txt", r"write dataloader\.data=\[a\.txt\]"),
    ("model=gtp2", 'no model is registered as "gtp2"; did you mean "gpt2"'),
    ("train.scheduler=cosine", 'no schedule is registered as "cosine"; did you mean "warmup_cosine"'),
    ("train.scheduler=null", "name a schedule"),
    ("train.scheduler.optimizer=3", "dufu fills it in itself"),
    ("model.cfg.num_layers=3", r"the key is model\.cfg\.hidden_layers"),
    ("train.stop_at_step=${train.sed}", r"train\.stop_at_step: .*train\.sed"),
    ("train.log_period=???", r"train\.log_period"),
    ("+train.foo=1", 'train has no key "foo"'),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_wrong_override_says_what_is_right(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        effective_config("gpt2_tiny", [text])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [(t, m) for t, m in WRONG if t[0] != "+" and "scheduler=null" not in t])
def test_the_same_in_a_file(text: str, message: str, tmp_path: Path) -> None:
    key, _, value = text.partition("=")
    config = yaml.safe_load(LazyConfig.to_yaml(effective_config("gpt2_tiny")))
    section = config
    for part in key.split(".")[:-1]:
        section = section.setdefault(part, {})
    section[key.split(".")[-1]] = yaml.safe_load(value)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    for source in (tmp_path / "config.yaml", tmp_path):  # as a file, and as the folder of a run
        with pytest.raises(ConfigError, match=message):
            effective_config(source)


def test_the_command_line_prints_one_line_and_ends_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", "gpt2_tiny", "train.learning_rte=1"]) == 2
    expected = 'error: override "train.learning_rte=1": train has no key "learning_rte"; did you mean "optim.lr"?\n'
    assert capsys.readouterr().err == expected
    assert list(tmp_path.iterdir()) == []


def test_numbers_are_numbers_however_they_are_written(tmp_path: Path) -> None:
    for written in ("1e-4", "1E-4", "1.e-4", '"1e-4"'):
        (tmp_path / "c.yaml").write_text(
            f"train: {{train_iter: 1e3}}\noptim: {{_target_: adamw, lr: {written}, eps: 1e-08, betas: ['9e-1', 0.99]}}\nmodel: gpt2\n"
        )
        for config in (
            effective_config(tmp_path / "c.yaml"),
            effective_config("gpt2_tiny", [f"optim.lr={written}", "train.train_iter=1e3"]),
        ):
            assert (config.optim.lr, config.optim.eps, config.train.train_iter) == (1e-4, 1e-8, 1000)
            assert type(config.train.train_iter) is int


def test_names_stand_for_calls(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "model: gpt2\noptim: sgd\ntrain: {scheduler: {alpha: 0.5}}\ndataloader: {dataset: masked_lm}\n"
    )
    config = effective_config(tmp_path / "c.yaml", ["model.cfg.hidden_size=64", "train.evaluation.evaluator=[perplexity,top_k]"])
    assert config.model == {"_target_": "gpt2", "cfg": {"hidden_size": 64}}
    assert config.optim.params._target_ == "dufu.optim.get_default_optimizer_params"
    assert (config.train.scheduler._target_, config.train.scheduler.alpha) == ("dufu.optim.WarmupCosineLR", 0.5)
    assert config.dataloader.dataset == {"_target_": "masked_lm"}
    assert [e._target_ for e in config.train.evaluation.evaluator] == ["perplexity", "top_k"]


def test_interpolations_see_defaults_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("train: {log_period: '${train.checkpointer.period}', seed: '${.log_period}'}\nmodel: gpt2\n")
    assert effective_config(tmp_path / "c.yaml").train.log_period == 5000
    assert effective_config(tmp_path / "c.yaml", ["train.checkpointer.period=7"]).train.seed == 7


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (["optim.params.clip_grad_norm=1.0", "optim.params.clip_grad_max_norm=0.5"], ("1.0", "0.5")),
        (["train.warmup_ratio=0.1", "train.scheduler.warmup_iter=7"], ("0.1", "7")),
    ],
)
def test_two_places_that_disagree_show_both_values(overrides: list[str], values: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        effective_config("gpt2_tiny", overrides)
    assert all(value in str(caught.value) for value in values)
    effective_config("gpt2_tiny", ["optim.params.clip_grad_norm=1.0", "optim.params.clip_grad_max_norm=1.0"])


def test_a_global_batch_that_is_not_its_factors_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["train.global_batch_size=16", "train.train_micro_batch_size=2", "train.num_accumulation_steps=4"]
    with pytest.raises(ConfigError, match=r"global_batch_size=16.* = 24"):
        plan_batch(effective_config("gpt2_tiny", given).train, 3)
    assert run(["show", "gpt2_tiny", *given, "train.dist.data_parallel_size=3"]) == 2
    error = capsys.readouterr().err
    assert "16" in error and "24" in error


def test_every_recipe_is_a_valid_config_and_survives_being_saved(tmp_path: Path) -> None:
    from dufu.training.effective import recipe_names

    assert {"gpt2_tiny", "bert_tiny", "gpt2_small", "bert_base", "quickstart"} <= set(recipe_names())
    for name in recipe_names():
        config = effective_config(name)
        LazyConfig.save(config, tmp_path / f"{name}.yaml")
        again = effective_config(tmp_path / f"{name}.yaml")
        assert again == config
        assert LazyConfig.to_yaml(again) == (tmp_path / f"{name}.yaml").read_text()
        refuse_unbuilt(config)


def test_a_bare_name_that_is_a_recipe_and_a_folder_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2_tiny").mkdir()
    with pytest.raises(ConfigError, match=r"write \./gpt2_tiny for the folder"):
        effective_config("gpt2_tiny")
    with pytest.raises(ConfigError, match=r"without config\.yaml"):
        effective_config("./gpt2_tiny")
    with pytest.raises(ConfigError, match='no recipe is called "gpt2_tinny"; did you mean "gpt2_tiny"'):
        effective_config("gpt2_tinny")


def test_every_key_is_read_somewhere_or_says_that_it_has_no_effect() -> None:
    import dufu as package
    from dufu.config.describe import describe_section
    from dufu.config.schema import SECTIONS

    home = Path(package.__file__).parent
    rooms = [p for p in home.rglob("*.py") if p.relative_to(home).parts[0] not in ("config", "recipes")]
    text = "\n".join(p.read_text(encoding="utf-8") for p in rooms)
    rows = [row for section in SECTIONS for row in describe_section(section)]
    assert {row.name for row in rows} <= set(section_paths())
    for row in rows:
        assert row.doc, row.name
        last = row.name.rpartition(".")[2]
        assert last in text or "without effect" in row.doc or "not built" in row.doc, row.name


def test_a_file_may_define_what_is_its_own_but_not_a_misspelt_section(tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text('from dufu.config import get_config\nmodel = "x"\nsizes = dict(a=1)\ntrian = dict(seed=1)\n')
    with pytest.raises(ConfigError, match='no section is called "trian"; did you mean "train"'):
        effective_config(tmp_path / "c.py")
    (tmp_path / "c.py").write_text("sizes = dict(a=1)\ntrain = dict(seed=3)\n")
    config = effective_config(tmp_path / "c.py")
    assert config.train.seed == 3
    assert "sizes" not in config


def test_what_is_not_built_says_so_before_anything_starts(tmp_path: Path) -> None:
    config = effective_config("gpt2_tiny", ["graph.auto_parallel.enabled=true"])
    with pytest.raises(NotBuiltError, match="auto parallel is not built yet"):
        refuse_unbuilt(config)
    assert get_config("common/models/graph.py").graph.auto_parallel.enabled is False
