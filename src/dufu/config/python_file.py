"""Run a `.py` config and return what it defines."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from dufu.config.lazy import CONFIG_MODULE, as_config, one_line
from dufu.config.renamed import replacement_in
from dufu.errors import ConfigError, DufuError, NotBuiltError, nearest

_LOAD = "__load_relative__"


class _RelativeImports(ast.NodeTransformer):
    """Turn `from .other import a as b` into a call that runs the file `other.py` beside this one.

    Relative imports in configs go by file, never by package, and each import statement runs the file anew, so two importers share
    no state.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.level == 0:
            return node
        if node.module is None or any(alias.name == "*" for alias in node.names):
            raise ConfigError(
                f"{self.path}:{node.lineno}: a relative import names a file and what it takes: from .file import name"
            )
        names = [ast.Constant(alias.name) for alias in node.names]
        call = ast.Call(
            func=ast.Name(id=_LOAD, ctx=ast.Load()),
            args=[ast.Constant(node.level), ast.Constant(node.module), ast.List(elts=list(names), ctx=ast.Load())],
            keywords=[],
        )
        targets = ast.Tuple(elts=[ast.Name(id=a.asname or a.name, ctx=ast.Store()) for a in node.names], ctx=ast.Store())
        return ast.fix_missing_locations(ast.copy_location(ast.Assign(targets=[targets], value=call), node))


def exported(values: dict[str, Any]) -> dict[str, Any]:
    """Return what a config file gives: its top-level mappings and config lists whose names do not begin with an underscore."""
    return {k: v for k, v in values.items() if not k.startswith("_") and isinstance(v, (dict, DictConfig, ListConfig))}


def run_file(path: Path, running: Sequence[Path] = ()) -> dict[str, Any]:
    """Run a config file and return its namespace.

    Args:
        path: the file.
        running: the files whose relative imports led here.

    Raises:
        ConfigError: not Python, or it raises; the message names the file and the line.
    """
    if path.resolve() in running:
        raise ConfigError(f"{path}: imports itself ({' → '.join(p.name for p in (*running, path))})")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except ValueError as error:  # a null byte
        raise ConfigError(f"{path}: {error}") from error
    code = compile(ast.fix_missing_locations(_RelativeImports(path).visit(tree)), str(path), "exec")

    def load_relative(level: int, module: str, names: list[str]) -> list[Any]:
        return _relative(path, level, module, names, (*running, path.resolve()))

    values: dict[str, Any] = {"__file__": str(path), "__name__": CONFIG_MODULE, _LOAD: load_relative}
    try:
        exec(code, values)
    except NotBuiltError:
        raise
    except DufuError as error:
        message = str(error)
        kind = ConfigError if isinstance(error, ConfigError) else type(error)
        raise kind(message if ".py:" in message else f"{_place(path, error)}: {message}") from error
    except Exception as error:
        raise ConfigError(_explain(path, error)) from error
    return values


def _relative(path: Path, level: int, module: str, names: list[str], running: Sequence[Path]) -> list[Any]:
    folder = path.parent
    for _ in range(level - 1):
        folder = folder.parent
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    if not file.is_file():
        part = "/".join(module.split(".")) + ".py"
        shipped = f'; dufu ships that part: get_config("{part}")' if (_shipped() / part).is_file() else ""
        raise ConfigError(f"relative import of {file}, which is not a file{shipped}")
    values = run_file(file, running)
    found = []
    for name in names:
        if name not in values:
            raise ConfigError(f'{file.name} defines no "{name}"{nearest(name, exported(values))}')
        value = values[name]
        found.append(as_config(value) if isinstance(value, dict) else value)
    return found


def _shipped() -> Path:
    return Path(__file__).parent.parent / "recipes"


def _place(path: Path, error: BaseException) -> str:
    """Return `file:line` of the statement in this config file that raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _explain(path: Path, error: Exception) -> str:
    from omegaconf.errors import OmegaConfBaseException

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = (frames[-1].line or "").strip() if frames else ""
    if isinstance(error, OmegaConfBaseException):
        message = one_line(error)
    elif isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in ("libai", "oneflow"):
        message = f"{error}; take LazyCall and get_config from dufu.config, and classes from dufu (docs/libai.md)"
    elif isinstance(error, ModuleNotFoundError):
        message = f"{error}; install it, or put its folder on PYTHONPATH"
    else:
        message = f"{type(error).__name__}: {error}"
    advice = replacement_in(line)
    return f"{_place(path, error)}: {advice or message}{f' (in: {line})' if line else ''}"
