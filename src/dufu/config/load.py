"""`LazyConfig`: load a `.py` or `.yaml` config, override it, save it, print it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from types import CodeType
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from dufu.config.lazy import as_config, target_path
from dufu.config.overrides import apply_overrides
from dufu.errors import ConfigError, nearest


def recipes_folder() -> Path:
    """Return the folder of the shipped recipes and config parts."""
    return Path(str(files("dufu") / "recipes"))


def get_config(name: str) -> DictConfig:
    """Return a packaged config part by its relative name, such as `common/train.py`."""
    path = recipes_folder() / name
    if not path.is_file():
        known = [str(p.relative_to(recipes_folder())) for p in recipes_folder().rglob("*.py")]
        raise ConfigError(f'no packaged config is called "{name}"{nearest(name, known)}')
    config: DictConfig = LazyConfig.load(path)
    return config


def try_get_key(cfg: Any, *keys: str, default: Any = None) -> Any:
    """Return the value of the first dotted key that exists in `cfg`."""
    missing = object()
    for key in keys:
        value = OmegaConf.select(cfg, key, default=missing) if isinstance(cfg, DictConfig) else missing
        if value is not missing:
            return value
    return default


class _RelativeImports(ast.NodeTransformer):
    """Turn `from .other import a as b` into a call that loads the file `other.py` beside this one.

    Relative imports in configs go by file, never by package, and each import runs the file anew, so two importers share no state.
    """

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.AST]:
        if node.level == 0:
            return node
        if node.module is None:
            raise ConfigError(f"line {node.lineno}: a relative import names a file: from .file import name")
        statements: list[ast.AST] = []
        for alias in node.names:
            call = ast.Call(
                func=ast.Name(id="__load_relative__", ctx=ast.Load()),
                args=[ast.Constant(node.level), ast.Constant(node.module), ast.Constant(alias.name)],
                keywords=[],
            )
            target = ast.Name(id=alias.asname or alias.name, ctx=ast.Store())
            statements.append(ast.copy_location(ast.Assign(targets=[target], value=call), node))
        return [ast.fix_missing_locations(statement) for statement in statements]


def _execute(path: Path) -> dict[str, Any]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    tree = ast.fix_missing_locations(_RelativeImports().visit(tree))
    code: CodeType = compile(tree, str(path), "exec")

    def load_relative(level: int, module: str, name: str) -> Any:
        folder = path.parent
        for _ in range(level - 1):
            folder = folder.parent
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        if not file.is_file():
            raise ConfigError(f"{path}: relative import of {file}, which is not a file")
        values = _execute(file)
        if name not in values:
            raise ConfigError(f'{path}: {file.name} defines no "{name}"{nearest(name, _exported(values))}')
        value = values[name]
        return as_config(value) if isinstance(value, dict) else value

    values: dict[str, Any] = {"__file__": str(path), "__name__": "__dufu_config__", "__load_relative__": load_relative}
    exec(code, values)
    return values


def _exported(values: dict[str, Any]) -> list[str]:
    return [k for k, v in values.items() if not k.startswith("_") and isinstance(v, (dict, DictConfig, list, ListConfig))]


class LazyConfig:
    """Load, override, save and print configs; every method is static."""

    apply_overrides = staticmethod(apply_overrides)

    @staticmethod
    def load(path: str | Path, keys: str | Sequence[str] | None = None) -> Any:
        """Load a config file.

        Args:
            path: a `.py` file (run as code) or a `.yaml`/`.yml` file (read by the safe loader).
            keys: one name, or several, to return instead of the whole.

        Raises:
            ConfigError: the file is missing, has another suffix, a syntax error, or lacks a key.
        """
        path = Path(path)
        if path.suffix not in (".py", ".yaml", ".yml"):
            raise ConfigError(f"{path}: a config file ends in .py, .yaml or .yml")
        if not path.is_file():
            raise ConfigError(f"{path}: no such config file")
        if path.suffix == ".py":
            values = _execute(path)
            config = as_config({k: values[k] for k in _exported(values) if isinstance(values[k], (dict, DictConfig, ListConfig))})
        else:
            try:
                config = as_config(OmegaConf.load(path))
            except Exception as error:  # the YAML library raises several unrelated types
                raise ConfigError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from error
        if keys is None:
            return config
        wanted = (keys,) if isinstance(keys, str) else tuple(keys)
        for key in wanted:
            if key not in config:
                raise ConfigError(f'{path}: no top-level "{key}"{nearest(key, [str(k) for k in config])}')
        return config[keys] if isinstance(keys, str) else tuple(config[key] for key in wanted)

    @staticmethod
    def load_rel(path: str, keys: str | Sequence[str] | None = None) -> Any:
        """Load a config file by a path relative to the caller's file."""
        caller = inspect.stack()[1].frame.f_globals.get("__file__")
        if caller is None:
            raise ConfigError("load_rel works from a file only")
        return LazyConfig.load(Path(caller).parent / path, keys)

    @staticmethod
    def to_yaml(cfg: Any) -> str:
        """Return the config as YAML, callables as their shortest dotted path; what cannot be written is an error."""
        return OmegaConf.to_yaml(as_config(_plain(OmegaConf.to_container(cfg, resolve=True), "")))

    @staticmethod
    def save(cfg: Any, path: str | Path) -> None:
        """Write the config as YAML that loads to the same config."""
        Path(path).write_text(LazyConfig.to_yaml(cfg), encoding="utf-8")

    @staticmethod
    def to_py(cfg: Any, prefix: str = "cfg.") -> str:
        """Return the config as Python assignments, one a line, keys sorted."""
        lines: list[str] = []

        def walk(node: Any, path: str) -> None:
            if isinstance(node, dict) and node and all(str(k).isidentifier() for k in node):
                if "_target_" in node:
                    inner = ", ".join(f"{k}={v!r}" for k, v in sorted(node.items()) if k != "_target_")
                    lines.append(f"{path} = {node['_target_']}({inner})")
                    return
                for key in sorted(node):
                    walk(node[key], f"{path}.{key}" if path else str(key))
            else:
                lines.append(f"{path} = {node!r}")

        walk(_plain(OmegaConf.to_container(cfg, resolve=True), ""), prefix.rstrip("."))
        return "\n".join(lines)


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v, f"{where}.{k}" if where else str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return target_path(value)
    raise ConfigError(f"{where}: a {type(value).__name__} cannot be written to YAML; wrap its construction in LazyCall")
