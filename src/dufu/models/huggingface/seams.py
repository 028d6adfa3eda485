"""Seams for tensor parallelism in a model that has none: modules keep their weights and names, and learn how they may be split."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from dufu.layers.split import WHOLE, Split, SplitRule
from dufu.models.huggingface.randomness import SEAM, KeyedDropout


class ColumnLinear(nn.Linear):
    """nn.Linear whose output features are divided; `gathered` = each process gets all of them again."""

    split: Split
    gathered: bool

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out or a part)."""
        y = functional.linear(self.split.enter(x), self.weight, self.bias)
        return gathered(y, self.split) if self.gathered else y


class RowLinear(nn.Linear):
    """nn.Linear whose input features are divided; `whole_input` = the input comes whole, and each process takes its part."""

    split: Split
    whole_input: bool

    def forward(self, x: Tensor) -> Tensor:
        """(…, in or a part) → (…, out)."""
        x = own_features(x, self.split) if self.whole_input else x
        y = self.split.leave(functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class ColumnConv1D(nn.Module):
    """GPT-2's Conv1D, a linear layer that stores its weight as (in, out), with its output features divided."""

    split: Split
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, part of out)."""
        return functional.linear(self.split.enter(x), self.weight.t(), self.bias)


class RowConv1D(nn.Module):
    """GPT-2's Conv1D with its input features divided."""

    split: Split
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """(…, part of in) → (…, out)."""
        y = self.split.leave(functional.linear(x, self.weight.t()))
        return y + self.bias.to(y.dtype)


class ColumnEmbedding(nn.Embedding):
    """A table whose columns, one a head, are divided: T5's relative positions."""

    split: Split

    def forward(self, ids: Tensor) -> Tensor:
        """(…) → (…, part of the columns)."""
        return functional.embedding(ids, self.weight)


def own_features(x: Tensor, split: Split) -> Tensor:
    """Return this process's part of the features of what all processes have alike."""
    return split.enter(x).chunk(split.size, -1)[split.rank]


def gathered(x: Tensor, split: Split) -> Tensor:
    """Return all processes' features; each has the whole gradient, and takes its own."""
    if split.size == 1:
        return x
    width = x.shape[-1]
    return split.leave(functional.pad(x, (split.rank * width, (split.size - 1 - split.rank) * width)))


def _become(module: nn.Module, cls: type[nn.Module], splits: dict[str, SplitRule], **settings: Any) -> None:
    module.__class__ = cls
    for name, value in {"split": WHOLE, "splits": splits, **settings}.items():
        setattr(module, name, value)


def is_conv1d(module: nn.Module) -> bool:
    """Say whether a module is GPT-2's Conv1D, with or without seams."""
    return any(cls.__name__ in ("Conv1D", "ColumnConv1D", "RowConv1D") for cls in type(module).__mro__) and hasattr(module, "nf")


def split_columns(module: nn.Module, sections: int = 1, gathered: bool = False) -> bool:
    """Let a linear layer be divided by output features; return whether it is one that can be.

    Args:
        sections: equal stretches that are divided each by itself.
        gathered: whether the output is put together again.
    """
    if type(module) is nn.Linear:
        rows = _sections(module.out_features, sections)
        _become(module, ColumnLinear, {"weight": SplitRule(0, rows), "bias": SplitRule(0, rows)}, gathered=gathered)
        return True
    if is_conv1d(module) and not gathered:
        rows = _sections(int(module.nf), sections)  # type: ignore[arg-type]
        _become(module, ColumnConv1D, {"weight": SplitRule(1, rows), "bias": SplitRule(0, rows)})
        return True
    if type(module) is nn.Embedding:
        _become(module, ColumnEmbedding, {"weight": SplitRule(1)})
        return True
    return False


def _sections(length: int, count: int) -> tuple[int, ...] | None:
    return None if count == 1 else (length // count,) * count


def split_rows(module: nn.Module, whole_input: bool = False) -> bool:
    """Let a linear layer be divided by input features; return whether it is one that can be."""
    if type(module) is nn.Linear:
        _become(module, RowLinear, {"weight": SplitRule(1)}, whole_input=whole_input)
        return True
    if is_conv1d(module) and not whole_input:
        _become(module, RowConv1D, {"weight": SplitRule(0)})
        return True
    return False


def sum_gradients(module: nn.Module) -> None:
    """Let a module that every process has, but that sees its own part of the heads only, sum the gradients of its weights."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = dict(self._parameters)
        try:
            for name, parameter in own.items():
                self._parameters[name] = None if parameter is None else self.split.enter(parameter)
            return original(self, *args, **kwargs)
        finally:
            self._parameters.update(own)

    original = type(module).forward
    cls = type(f"Shared{type(module).__name__}", (type(module),), {"forward": forward})
    _become(module, cls, {})


def divide_numbers(module: nn.Module, names: tuple[str, ...]) -> None:
    """Let numbers of an attention module, such as that of its heads, be those of this process's part."""

    def part(name: str) -> property:
        return property(lambda self: self.__dict__[name] // getattr(self, SEAM).split.size)

    held = {name: part(name) for name in names if name in vars(module)}
    module.__class__ = type(f"Part{type(module).__name__}", (type(module),), held)


def divide_features(module: nn.Module) -> bool:
    """Let a dropout know that its features are divided; return whether it is one."""
    if isinstance(module, KeyedDropout):
        module.divided = True
    return isinstance(module, KeyedDropout)


__all__ = [
    "ColumnConv1D",
    "ColumnEmbedding",
    "ColumnLinear",
    "RowConv1D",
    "RowLinear",
    "divide_features",
    "divide_numbers",
    "gathered",
    "is_conv1d",
    "own_features",
    "split_columns",
    "split_rows",
    "sum_gradients",
]  # fmt: skip
