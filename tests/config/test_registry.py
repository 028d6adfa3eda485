"""Short names: dufu's own, and those that an installed package brings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dufu.cli.main import run
from dufu.config import LazyCall, instantiate, registry
from dufu.config.registry import lookup, names, register_schedule
from dufu.config.resolve import resolve
from dufu.errors import ConfigError
from dufu.optim import AdamW
from dufu.training.effective import effective_config


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten afterwards."""
    for kind in registry.HOMES:
        names(kind)
    monkeypatch.setattr(registry, "_NAMES", {kind: dict(held) for kind, held in registry._NAMES.items()})
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """A distribution as pip would leave it: a module, and a dist-info folder that names entry points."""
    (tmp_path / "stranger.py").write_text(
        "class Rate:\n"
        "    '''A rate of its own.\n\n    Args:\n        level: its height.\n    '''\n"
        "    def __init__(self, optimizer, max_iter: int, level: float = 0.5):\n        self.level = level\n"
        "class AdamW:\n    pass\n"
    )
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[dufu.schedule]\nstrange = stranger:Rate\nbroken = stranger:Nothing\nabsent = no_such_module:X\n"
        "[dufu.optimizer]\nadamw = stranger:AdamW\n"
    )
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path.remove(str(tmp_path))
    sys.modules.pop("stranger", None)


def test_an_installed_package_brings_a_class_by_name(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert names("schedule")["strange"] == "stranger.Rate"
    assert "stranger" not in sys.modules  # listing loads nothing
    config = effective_config("gpt2_tiny", ["train.scheduler=strange", "train.scheduler.level=1e-1"])
    assert config.train.scheduler == {"_target_": "strange", "level": 0.1}
    built = instantiate(config.train.scheduler, optimizer=None, max_iter=3)
    assert (type(built).__module__, built.level) == ("stranger", 0.1)
    with pytest.raises(ConfigError, match=r'train\.scheduler has no key "levle"; did you mean "level"'):
        effective_config("gpt2_tiny", ["train.scheduler=strange", "train.scheduler.levle=1"])
    assert run(["show", "strange"]) == 0
    assert "level: float = 0.5\n    its height." in capsys.readouterr().out


def test_an_entry_point_that_does_not_load_is_one_line(installed: Path) -> None:
    for name in ("broken", "absent"):
        with pytest.raises(ConfigError, match=f'schedule "{name}" is the entry point .* cannot be loaded'):
            lookup(name, "schedule")


def test_two_things_of_one_name_are_never_guessed(installed: Path) -> None:
    with pytest.raises(ConfigError, match=r'"adamw" is both dufu\.optim\.AdamW and stranger\.AdamW; give the dotted path'):
        lookup("adamw", "optimizer")
    register_schedule("adafactor")(AdamW)
    with pytest.raises(ConfigError, match="the name of a registered optimizer and a registered schedule; give the dotted path"):
        lookup("adafactor")
    assert lookup("adafactor", "schedule") is AdamW
    config = effective_config("gpt2_tiny", ["train.scheduler=adafactor"])  # the key says which one is meant
    assert config.train.scheduler._target_ == "dufu.optim.AdamW"


def test_a_name_belongs_to_one_class() -> None:
    class First:
        pass

    class Second:
        pass

    register_schedule("test_registry_once")(First)
    register_schedule("test_registry_once")(First)
    with pytest.raises(ConfigError, match="already"):
        register_schedule("test_registry_once")(Second)
    with pytest.raises(ConfigError, match='no optimizer is registered as "adamv"; did you mean "adam'):
        lookup("adamv", "optimizer")
    with pytest.raises(ConfigError, match="no kind"):
        names("modle")


def test_a_registered_class_may_be_named_by_its_path_wherever_it_lies() -> None:
    from tests.config import targets

    with pytest.raises(ConfigError, match="lies outside"):
        resolve("tests.config.targets.Unnamed")
    register_schedule("test_unnamed")(targets.Unnamed)
    assert instantiate(LazyCall("test_unnamed")(count=3)).count == 3
    assert resolve("dufu.data.CausalLMDataset") is lookup("causal_lm")
