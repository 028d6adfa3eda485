"""Things that a config may build in these tests; no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from dufu.config import configurable


@dataclass
class Point:
    """A dataclass, as a value and as a target."""

    x: int = 0
    y: float = 0.0
    tags: list[str] = field(default_factory=list)


class Keeper:
    """Keeps whatever it is given."""

    def __init__(self, **given: Any) -> None:
        self.given = given


class Typed:
    """One argument of each type.

    Args:
        text: words.
        count, size: whole numbers, of
            two kinds.
        rate: a number.
    """

    def __init__(
        self,
        text: str = "",
        count: int = 0,
        size: int | None = None,
        rate: float = 0.0,
        flag: bool = False,
        names: list[str] = (),  # type: ignore[assignment]
        pair: tuple[float, float] = (0.0, 0.0),
        table: dict[str, dict[str, float]] | None = None,
        kind: Literal["a", "b"] = "a",
        step: Literal[1, 2] = 1,
        free: Any = None,
        act: Callable[..., Any] | None = None,
        bare=1.0,
    ) -> None:
        self.given = {k: v for k, v in locals().items() if k != "self"}


class Sized:
    """Takes its arguments one by one, or as one cfg."""

    @configurable
    def __init__(self, size: int, depth: int = 2) -> None:
        self.size, self.depth = size, depth


class Renamed:
    """Reads a cfg in its own way."""

    @configurable
    def __init__(self, size: int, depth: int = 2) -> None:
        self.size, self.depth = size, depth

    @classmethod
    def from_config(cls, cfg: Any) -> dict[str, Any]:
        return {"size": cfg.width * 2}


def add(a: int, b: int = 1) -> int:
    return a + b


def make_adder(b: int) -> Callable[[int], int]:
    def adder(a: int) -> int:
        return a + b

    return adder


def fails(a: int) -> None:
    raise ValueError(f"a is {a}")


class Unnamed:
    """Never handed to LazyCall as an object."""

    def __init__(self, count: int) -> None:
        self.count = count


def _area_from_config(cfg: Any, stretch: int = 1) -> dict[str, int]:
    return {"width": cfg["side"] * stretch, "height": cfg["side"]}


@configurable(from_config=_area_from_config)
def area(width: int, height: int) -> int:
    return width * height
