"""Config files: Python with relative imports, safe YAML, and the way back to text."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dufu.config import LazyCall, LazyConfig, get_config, instantiate, try_get_key
from dufu.config.lazy import as_config
from dufu.errors import ConfigError
from tests.config.targets import Keeper, Point, Typed, add


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_python_file_exports_its_mappings(tmp_path: Path) -> None:
    write(tmp_path, a="from omegaconf import OmegaConf\nx = dict(y=1)\n_hidden = dict(z=2)\nn = 3\nl = OmegaConf.create([1])\n")
    cfg = LazyConfig.load(tmp_path / "a.py")
    assert set(cfg) == {"x", "l"}
    assert LazyConfig.load(tmp_path / "a.py", "x").y == 1
    x, n = LazyConfig.load(tmp_path / "a.py", ("x", "n"))
    assert (x.y, n) == (1, 3)
    with pytest.raises(ConfigError, match=r'a\.py: no top-level "xx"; did you mean "x"'):
        LazyConfig.load(tmp_path / "a.py", "xx")


def test_relative_imports_go_by_file_and_share_no_state(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "leaf.py").write_text("cfg = dict(n=1)\nother = cfg\n")
    write(
        tmp_path,
        first="from .parts.leaf import cfg\ncfg.n = 2\n",
        second="from .first import cfg as mine\nfrom .parts.leaf import cfg, other\nfresh, changed = dict(n=cfg.n), dict(n=mine.n)\n",
    )
    (tmp_path / "parts" / "up.py").write_text("from ..first import cfg\n")
    cfg = LazyConfig.load(tmp_path / "second.py")
    assert (cfg.fresh.n, cfg.changed.n) == (1, 2)
    assert LazyConfig.load(tmp_path / "parts" / "up.py").cfg.n == 2


def test_load_rel_starts_from_the_callers_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.yaml").write_text("x: 5\n")
    write(tmp_path, a='from dufu.config import LazyConfig\nb = LazyConfig.load_rel("sub/b.yaml")\n')
    assert LazyConfig.load(tmp_path / "a.py").b.x == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", r"bad\.py:1: "),
        ("x = {}\n\ny = 1 / 0\n", r"bad\.py:3: ZeroDivisionError: division by zero \(in: y = 1 / 0\)"),
        ("from .missing import x\n", r"missing\.py, which is not a file"),
        ("from .common.train import train\n", r'get_config\("common/train\.py"\)'),
        ("from . import x\n", "a relative import names a file"),
        ("from .bad import x\n", "imports itself"),
        ("from libai.config import LazyCall\n", r"bad\.py:1: No module named 'libai'; take .* from dufu\.config"),
        ("from no_such_package import x\n", "put its folder on PYTHONPATH"),
        (
            "from dufu.config import get_config\nt = get_config('common/trian.py')\n",
            r'bad\.py:2: .* did you mean "common/train\.py"',
        ),
        (
            "from dufu.config import get_config\ntrain = get_config('common/train.py').train\ntrain.ampp.enabled = True\n",
            r'bad\.py:3: "train" has no key "ampp"; did you mean "amp"',
        ),
        (
            "from dufu.config import LazyCall\nclass Mine: pass\nmodel = LazyCall(Mine)()\n",
            "Mine is defined in the config file.*move it into a module",
        ),
    ],
)
def test_a_fault_in_a_python_file_is_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, bad=text)
    with pytest.raises(ConfigError, match=message) as caught:
        LazyConfig.load(tmp_path / "bad.py")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", r"bad\.yaml:2: not readable as YAML"),
        ("a: 1\nb: 2\na: 3\n", r'bad\.yaml:3: .*key "a" stands twice'),
        ("- 1\n", "holds a list; a config is a mapping"),
        ("a: !!python/object/apply:os.system ['touch marker']\n", "could not determine a constructor"),
        ("a: !!python/name:os.system\n", "could not determine a constructor"),
    ],
)
def test_a_fault_in_a_yaml_file_is_one_line_and_runs_nothing(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        LazyConfig.load(tmp_path / "bad.yaml")
    assert not (tmp_path / "marker").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    for name, message in (("a.json", r"ends in \.py, \.yaml, \.yml"), ("none.yaml", "no such"), ("latin.yaml", "not UTF-8")):
        with pytest.raises(ConfigError, match=message):
            LazyConfig.load(tmp_path / name)


def test_yaml_round_trip_gives_the_same_config_and_the_same_objects(tmp_path: Path) -> None:
    words = [
        "1e-4",
        "off",
        "007",
        "1_000",
        "0x10",
        "",
        "null",
        "~",
        "C:\\a",
        "a=b",
        "=",
        "é",
        "a\nb",
        ".5",
        "inf",
        "${x}",
        "\\${y}",
    ]
    cfg = as_config(
        {
            "call": LazyCall(Keeper)(p=Point(3, tags=["007"]), f=add, inner=LazyCall(add)(a=1), none=None, x=1e-5, n=float("inf")),
            "words": [w.replace("${", "\\${") if w == "${x}" else w.replace("\\${", "\\\\\\${") for w in words],
            "link": "${call.x}",
        }
    )
    LazyCall(Point)()  # handed over by the program itself, so that the saved path may be built again
    path = tmp_path / "c.yaml"
    LazyConfig.save(cfg, path)
    again = LazyConfig.load(path)
    assert list(again.words) == words
    assert again.link == 1e-5
    LazyConfig.save(again, tmp_path / "d.yaml")
    assert path.read_text() == (tmp_path / "d.yaml").read_text()
    given = instantiate(again.call).given
    assert given["p"] == Point(3, tags=["007"])
    assert given["f"] == "tests.config.targets.add"  # a callable as a value is written as its path
    assert (given["inner"], given["none"], given["x"], given["n"]) == (2, None, 1e-5, float("inf"))


def test_what_yaml_cannot_hold_is_refused_by_name() -> None:
    for value in (Keeper(), object()):
        with pytest.raises(ConfigError, match=r"call\.a: a .* cannot be written to YAML; wrap its construction in LazyCall"):
            LazyConfig.to_yaml(as_config({"call": {"a": value}}))
    with pytest.raises(ConfigError, match="importable"):
        LazyConfig.to_yaml(as_config({"a": lambda: 1}))


def test_to_py_gives_sorted_assignments_that_are_python() -> None:
    cfg = as_config({"b": {"y": 1, "x": [1, 2]}, "a": LazyCall(Typed)(text="t", table={"k": {"z": 1.0}}, free=LazyCall(add)(a=1))})
    lines = LazyConfig.to_py(cfg).splitlines()
    assert lines[-2:] == ["cfg.b.x = [1, 2]", "cfg.b.y = 1"]
    assert lines[0].startswith("cfg.a = tests.config.targets.Typed(")
    assert "free=tests.config.targets.add(a=1)" in "".join(lines)
    for text in (LazyConfig.to_py(cfg), LazyConfig.to_py(cfg, prefix=""), LazyConfig.to_py({"long": {"k y": ["x" * 60] * 4}})):
        ast.parse(text)


def test_try_get_key_takes_the_first_that_exists() -> None:
    cfg = as_config({"a": {"b": None}, "c": 3})
    assert try_get_key(cfg, "x.y", "c") == 3
    assert try_get_key(cfg, "a.b", "c") is None
    assert try_get_key(cfg, "c.d", "x", default=7) == 7


def test_packaged_parts_are_found_by_name_and_shared_with_nobody() -> None:
    first = get_config("common/train.py").train
    first.seed = 7
    assert get_config("common/train.py").train.seed == 1234
    for name in ("common/nothing.py", "../__init__.py", "/etc/passwd"):
        with pytest.raises(ConfigError, match="no packaged config"):
            get_config(name)
