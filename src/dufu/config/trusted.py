"""Which callables a config may name. A config file in YAML, an override and a checkpoint's config are data: they never choose freely what runs."""

from __future__ import annotations

# Parts of dufu and of PyTorch that only compute. The whole of either is not among them: torch.load and torch.hub run code, and
# other rooms of dufu start processes and write files.
_ROOMS = ("dufu.layers", "dufu.models", "dufu.optim")
_OUTSIDE = ["torch.nn", "torch.optim"]
# PyTorch's compiled functions call themselves by the module they were compiled in.
_COMPILED = ("torch._C._nn", "torch._C")
# Callables that a running program has handed over itself (`LazyCall(my_function)`): it could call them anyway.
_HELD: set[str] = set()


def trust(package: str) -> None:
    """Let configs name every callable of `package` (`--trust PACKAGE` on the command line)."""
    if package not in _OUTSIDE:
        _OUTSIDE.append(package)


def hold(path: str) -> None:
    """Let configs name the one callable of this path, which the program holds already."""
    _HELD.add(path)


def is_held(path: str) -> bool:
    """Say whether the program itself has handed over the callable of this path."""
    return path in _HELD


def is_trusted(path: str) -> bool:
    """Say whether a dotted path lies in a trusted package."""
    return _inside(path, (*_ROOMS, *_OUTSIDE))


def is_compiled(module: str | None) -> bool:
    """Say whether a callable found in a trusted package was compiled as part of PyTorch."""
    return module in _COMPILED


def trusted_packages() -> tuple[str, ...]:
    """Return the packages whose callables a config may name."""
    return (*_ROOMS, *_OUTSIDE)


def _inside(path: str, packages: tuple[str, ...]) -> bool:
    return any(path == package or path.startswith(package + ".") for package in packages)
