"""dufu: train, evaluate and run transformer models from a laptop to a cluster; any layout, the same numbers.

Public names are imported on first use, so that `import dufu` costs nothing and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "train": "dufu.training.run",
    "check": "dufu.parity.module_check",
    "load": "dufu.training.load",
    "generate": "dufu.generation.pipeline",
    "parallelize": "dufu.distributed",
    "DufuError": "dufu.errors",
}

__all__ = ["DufuError", "__version__", "check", "generate", "load", "parallelize", "train"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'dufu' has no attribute {name!r}")
