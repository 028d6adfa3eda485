"""Data never chooses what runs: a config names callables of a few packages only, and nothing else is even imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from dufu.cli.main import run
from dufu.config import LazyCall, instantiate, trusted
from dufu.config.lazy import as_config
from dufu.config.resolve import resolve
from dufu.errors import ConfigError
from dufu.training.effective import effective_config
from tests.small import TINY

REFUSED = [
    "os.system",
    "posix.system",
    "builtins.eval",
    "subprocess.Popen",
    "torch.load",
    "torch.hub.load",
    "torch.nn.os.system",
    "torch.nn.modules.module.torch.load",
    "torch.nn.Module.__init__",
    "torch.nn.functional.importlib.import_module",
    "dufu.optim.os.system",
    "dufu.data.corpus.os.system",
    "dufu.models.gpt2.model.math.sqrt",
    "dufu.config.python_file.run_file",
    "dufu.config.load.LazyConfig.load",
    "dufu.config.trusted.trust",
    "dufu.config.instantiate.trust",
    "dufu.cli.main.run",
    "dufu.data.IndexedWriter",
    "dufu.parallel.launch.launch",
    "dufu.optim.AdamW.__init__.__globals__.get",
    "dufu.layers._private",
    "dufu.optim.adam.torch.load",
    "antigravity.geohash",
]


@pytest.fixture(autouse=True)
def own_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test trusts is forgotten afterwards."""
    monkeypatch.setattr(trusted, "_OUTSIDE", list(trusted._OUTSIDE))
    monkeypatch.setattr(trusted, "_HELD", set())


@pytest.mark.parametrize("target", REFUSED)
def test_a_target_outside_is_refused_without_importing_it(target: str) -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=r"^here: "):
        resolve(target, "here")
    assert "antigravity" not in set(sys.modules) - before


@pytest.mark.parametrize("target", ["os.system", "builtins.eval", "subprocess.Popen", "torch.load", "dufu.optim.os.system"])
def test_nothing_runs_from_a_file_an_override_or_a_recorded_call(target: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    call = {"_target_": target, "command": f"touch {marker}", "args": ["touch", str(marker)], "f": str(marker)}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"model": call}))
    (tmp_path / "nested.yaml").write_text(yaml.safe_dump({"model": {"_target_": "gpt2", "cfg": {"activation": call}}}))
    (tmp_path / "target.yaml").write_text(yaml.safe_dump({"model": {"_target_": call}}))
    for source, overrides in (
        (tmp_path / "c.yaml", []),
        (tmp_path / "nested.yaml", []),
        (tmp_path / "target.yaml", []),
        ("gpt2_tiny", [f"model._target_={target}"]),
        ("gpt2_tiny", [f"optim.params._target_={target}"]),
        ("gpt2_tiny", [f"train.evaluation.evaluator=[{{_target_: {target}}}]"]),
        ("gpt2_tiny", [f"dataloader.dataset={target}"]),
    ):
        with pytest.raises(ConfigError, match="_target_: "):
            effective_config(source, overrides)
    for recorded in (call, {"_target_": call}, {"_target_": "dufu.optim.AdamW", "params": [call]}):
        with pytest.raises(ConfigError):
            instantiate(as_config(recorded))
    assert not marker.exists()


def test_nothing_runs_from_the_config_inside_a_checkpoint(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    settings = [*TINY, "train.train_iter=1", f"train.output_dir={folder}"]
    assert run(["train", "gpt2_tiny", "--data", str(corpus), *settings]) == 0
    marker = tmp_path / "marker"
    found = [folder / "config.yaml", *folder.glob("checkpoints/*/config.yaml")]
    assert len(found) >= 2
    for path in found:
        config = yaml.safe_load(path.read_text())
        config["model"] = {"_target_": "os.system", "command": f"touch {marker}"}
        path.write_text(yaml.safe_dump(config))
    capsys.readouterr()
    checkpoint = str(found[1].parent)
    for arguments in (
        ["train", str(folder), "--resume", "train.train_iter=2"],
        *(
            [verb, place, *more]
            for verb, more in (("eval", []), ("generate", ["--prompt", "a"]))
            for place in (str(folder), checkpoint)
        ),
    ):
        assert run(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    assert not marker.exists()


def test_what_a_program_hands_over_itself_may_be_built() -> None:
    from tests.config.targets import Keeper, make_adder

    path = "tests.config.targets.make_adder"
    with pytest.raises(ConfigError, match=r"add --trust tests"):
        resolve(path)
    LazyCall(make_adder)(b=1)
    assert resolve(path) is make_adder
    assert isinstance(instantiate(LazyCall(Keeper)()), Keeper)


def test_trusting_a_package_is_said_in_so_many_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trusted_one.py").write_text("from dufu.optim import AdamW\nfrom os import system\nclass Mine(AdamW):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = ["show", "gpt2_tiny", "optim._target_=trusted_one.Mine"]
    assert run(asked) == 2
    assert "--trust trusted_one" in capsys.readouterr().err
    assert run([*asked, "--trust", "trusted_one"]) == 0
    assert "_target_: trusted_one.Mine" in capsys.readouterr().out
    assert run(["show", "gpt2_tiny", "optim._target_=trusted_one.system"]) == 2  # what it has merely imported is not its own
    assert "posix.system, which is not trusted" in capsys.readouterr().err


def test_names_from_libai_say_the_name_here() -> None:
    for target, answer in (
        ("libai.models.GPTForPreTraining", r"dufu\.models\.gpt2\.GPT2"),
        ("oneflow.nn.optimizer.adamw.AdamW", r"dufu\.optim\.AdamW"),
        ("libai.scheduler.WarmupPolynomialLR", r"dufu\.optim\.WarmupPolynomialLR"),
        ("libai.models.SwinTransformer", r"dufu\.models\.swin\.SwinTransformer"),
        ("libai.models.PaLM", "does not exist here"),
    ):
        with pytest.raises(ConfigError, match=answer):
            resolve(target)
