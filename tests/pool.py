"""The pool of processes as tests use it: what goes wrong on a rank is the test's own failure, with the rank's traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dufu.errors import DufuError
from dufu.parallel.pool import Pool, WorkerError, free_port


class Ranks:
    """Calls a top-level function on several ranks at once: `ranks(2, function, *arguments)` returns each rank's result."""

    def __init__(self) -> None:
        self.pool = Pool()

    def close(self) -> None:
        self.pool.close()

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        try:
            return self.pool(size, function, *arguments, timeout=timeout)
        except WorkerError as error:
            raise AssertionError(f"{error}\n{error.trace}") from None
        except DufuError as error:
            raise AssertionError(f"a rank failed: {type(error).__name__}: {error}") from None


__all__ = ["Ranks", "free_port"]
