"""What a value is, however it is written: the table of docs/config.md, in an override and in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dufu.config import LazyCall, LazyConfig
from dufu.config.check import check_calls
from dufu.config.lazy import as_config
from dufu.config.overrides import apply_overrides
from dufu.errors import ConfigError
from tests.config.targets import Typed

COLUMNS = ("text", "count", "rate", "flag", "names", "free")
# Where a file differs from the command line, because its reader knows no declared types.
FILE = {
    **{("text", w): "error" for w in ("true", "1e3", "1e-4", "1E-4", "1.e-4", "[a,b]")},
    ("free", "1_000"): "'1_000'",
}


def table() -> list[tuple[str, str, str]]:
    """Return (key, written, expected) of every cell."""
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")
    rows = [[c.strip().strip("`") for c in line.strip("| ").split(" | ")] for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == 14
    return [(key, row[0], cell) for row in rows for key, cell in zip(COLUMNS, row[1:], strict=True)]


def as_checked(key: str, value: Any) -> str:
    cfg = as_config({"x": LazyCall(Typed)(**{key: value})})
    try:
        return repr(check_calls(OmegaConf.to_container(cfg.x), "x")[key])
    except ConfigError as error:
        assert str(error).startswith(f"x.{key}=")
        return "error"


@pytest.mark.parametrize(("key", "written", "expected"), table())
def test_the_table_holds_on_the_command_line(key: str, written: str, expected: str, tmp_path: Path) -> None:
    cfg = apply_overrides(as_config({"x": LazyCall(Typed)()}), [f"x.{key}={written}"])
    assert as_checked(key, cfg.x[key]) == expected
    if expected != "error":  # what was understood survives being written and read
        checked = as_config(check_calls(OmegaConf.to_container(cfg.x), "x"))
        LazyConfig.save(checked, tmp_path / "saved.yaml")
        again = LazyConfig.load(tmp_path / "saved.yaml")
        assert as_checked(key, again[key]) == expected
        assert LazyConfig.to_yaml(again) == (tmp_path / "saved.yaml").read_text()


@pytest.mark.parametrize(("key", "written", "expected"), table())
def test_the_table_holds_in_a_file(key: str, written: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"v: {written}\n")
    assert as_checked(key, LazyConfig.load(tmp_path / "c.yaml").v) == FILE.get((key, written), expected)


def test_a_declared_type_is_met_exactly_or_refused() -> None:
    def value(key: str, given: Any) -> Any:
        return check_calls({"_target_": Typed, key: given}, "x")[key]

    assert value("size", None) is None
    assert value("pair", ["1e-4", 1]) == [1e-4, 1.0]
    assert value("table", {"k": {"lr": "1e-4"}}) == {"k": {"lr": 1e-4}}
    assert value("step", "2") == 2
    assert type(value("step", 2.0)) is int
    assert value("bare", "1e-4") == 1e-4  # no type is written, but the default is a number
    assert value("bare", "three") == "three"
    assert value("act", "torch.nn.functional.relu").__name__ == "relu"
    for key, given, message in (
        ("size", "None", "expected a whole number; write null for none"),
        ("size", 1.5, "expected a whole number; nearest 2"),
        ("size", float("inf"), "expected a whole number$"),
        ("size", True, "expected a whole number"),
        ("pair", [1], "expected a list of 2"),
        ("pair", "0.9,0.95", r"expected a list; write x\.pair=\[0\.9,0\.95\]"),
        ("table", {"k": {"lr": "fast"}}, r"x\.table\.k\.lr='fast': expected a number"),
        ("table", 3, "expected keys with values"),
        ("kind", "c", "one of a, b"),
        ("step", 3, "one of 1, 2"),
        ("step", True, "one of 1, 2"),
        ("names", "a", r"write x\.names=\[a\]"),
        ("names", [1.5], r"x\.names\[0\]=1\.5: expected text; put it in quotes"),
        ("act", "os.system", "lies outside"),
    ):
        with pytest.raises(ConfigError, match=message):
            value(key, given)


def test_an_override_is_a_key_and_a_value() -> None:
    cfg = as_config({"x": LazyCall(Typed)(), "plain": {"a": 1, "l": [1, 2]}})
    apply_overrides(cfg, ["x.size=1", "x.size=2", "plain.l.1=5", "+plain.new.deep=3", "plain.a=${x.size}", "x.table.k.lr=1e-4"])
    assert (cfg.x.size, list(cfg.plain.l), cfg.plain.new.deep, cfg.plain.a, cfg.x.table.k.lr) == (2, [1, 5], 3, 2, 1e-4)
    for text, message in (
        ("x.size", "write key=value"),
        ("=3", "write key=value"),
        ("~x.size=1", "deleting a key is not supported"),
        ("x.sise=1", 'x has no key "sise"; did you mean "size"'),
        ("plain.b=1", 'plain has no key "b"; known: a, l'),
        ("plain.a.b=1", "plain.a is a plain value"),
        ("plain.l.7=1", "a list of 2"),
        ("x.free=[a", "quote a value"),
        ("x.free=1,2", r"write \[1,2\] for a list, or '1,2' for text"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f'override "{text}"') + ".*" + message):
            apply_overrides(cfg, [text])


def test_a_mapping_is_laid_over_and_a_call_replaces() -> None:
    cfg = as_config({"a": {"b": 1, "c": 2}, "x": LazyCall(Typed)(text="t", count=1)})
    apply_overrides(cfg, ["a={b: 5}", "x={count: 2}"])
    assert (cfg.a.b, cfg.a.c, cfg.x.text, cfg.x.count) == (5, 2, "t", 2)
    apply_overrides(cfg, ["x={_target_: tests.config.targets.Typed, rate: 1}"])
    assert dict(cfg.x) == {"_target_": "tests.config.targets.Typed", "rate": 1}
