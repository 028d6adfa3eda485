"""`dufu show`: what there is, what it takes, and what a config comes to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dufu.cli.main import run
from dufu.config.describe import argument_docs, describe_callable
from dufu.config.schema import section_paths
from dufu.training.effective import effective_config
from tests.small import dufu


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["show", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--help"], ["show", "train"], ["show", "graph"], ["show", "dataloader"], ["show", "tokenization"]]
)
def test_help_and_sections_cost_no_torch(arguments: list[str]) -> None:
    script = f"import sys; from dufu.cli.main import run; run({arguments!r}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_without_a_name_it_lists_recipes_sections_and_registered_names(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys)
    for name in ("gpt2_tiny", "bert_base", "train", "optim", "adamw", "warmup_cosine", "causal_lm", "cross_entropy", "perplexity"):
        assert f"\n  {name} " in text
    assert "dufu.optim.AdamW" in text


def test_a_section_shows_every_key_with_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "train")
    rows = [line for line in text.splitlines() if line.startswith("train.")]
    leaves = {p for p in section_paths() if p.startswith("train.") and not any(q.startswith(p + ".") for q in section_paths())}
    assert {line.split(":")[0] for line in rows} == leaves
    assert "train.amp.level: Literal['O0', 'O1', 'O2', 'O3'] | None = None\n    O0 fp32;" in text
    assert "train.scheduler: schedule = dufu.optim.WarmupCosineLR(alpha=0.01, " in text
    assert shown(capsys, "train.amp").count("train.amp.") >= 4
    assert shown(capsys, "train.seed").startswith("train.seed: int = 1234\n    ")
    assert "gpt2" in shown(capsys, "model")


def test_a_registered_name_and_a_dotted_path_show_arguments_with_their_words(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "gpt2")
    assert text.startswith("model gpt2 = dufu.models.GPT2\nGPT-2 for language modelling.\n")
    assert "\nhidden_size: int = 768\n    width." in text
    assert "\noptimizer: Any\n    whose groups are set" in shown(capsys, "warmup_cosine")  # documented by the class it derives from
    assert "\nlr: float = 0.001\n    learning rate." in shown(capsys, "dufu.optim.AdamW")
    assert "It takes other arguments as well." in shown(capsys, "torch.nn.Sequential") or "no arguments" in shown(
        capsys, "torch.nn.Sequential"
    )
    assert "\nhidden_size: int = 768\n    width." in shown(capsys, "bert_classifier")  # documented as "those of Bert"


def test_docstrings_are_read_by_argument() -> None:
    from tests.config.targets import Typed

    docs = argument_docs(Typed)
    assert docs == {
        "text": "words.",
        "count": "whole numbers, of two kinds.",
        "size": "whole numbers, of two kinds.",
        "rate": "a number.",
    }
    rows = {row.name: row for row in describe_callable(Typed)[1]}
    assert (rows["pair"].type, rows["pair"].default, rows["bare"].type) == ("tuple[float, float]", "[0.0, 0.0]", "")


def test_every_argument_of_a_registered_class_is_explained() -> None:
    from dufu.config.registry import HOMES, lookup, names

    silent = []
    for kind in HOMES:
        for name, path in names(kind).items():
            if path.startswith("dufu."):
                silent += [f"{kind} {name}: {row.name}" for row in describe_callable(lookup(name, kind))[1] if not row.doc]
    assert not silent


def test_a_recipe_shows_its_effective_config_and_can_be_run_from_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(shown(capsys, "gpt2_tiny", "optim.lr=1e-2", "train.output_dir=007"))
    config = effective_config(tmp_path / "c.yaml")
    assert config == effective_config("gpt2_tiny", ["optim.lr=0.01", "train.output_dir=007"])
    assert (config.optim.lr, config.train.output_dir) == (0.01, "007")
    assert "cfg.optim = dufu.optim.AdamW(\n" in shown(capsys, "gpt2_tiny", "--py")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt3"], 'nothing is called "gpt3"; did you mean "gpt2"'),
        (["train.ampp"], 'did you mean "train.amp"'),
        (["os.system"], "lies outside the packages"),
        (["gpt2", "train.seed=3"], "goes with a recipe or a config file"),
        (["train", "--py"], "--py goes with a recipe or a config file"),
        (["nothing.yaml"], "no such config file"),
        (["gpt2_tiny", "train.sede=3"], 'did you mean "seed"'),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_the_first_help_page_is_quick() -> None:
    done = dufu("--help")
    assert done.returncode == 0
    assert "show" in done.stdout
