"""Linear layers that say how they may be split: by output features ("col"), by input features ("row"), or not ("data")."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.errors import ConfigError
from dufu.layers.initial import Constant, Described, Initial, Normal
from dufu.layers.split import WHOLE, Split, SplitRule

Parallel = Literal["data", "col", "row"]


class Linear(Described):
    """y = x Wᵀ + b.

    Args:
        in_features, out_features: sizes of the whole layer.
        bias: whether to add b.
        parallel: "col" divides W's rows (the output features) over tensor-parallel processes: a replicated input gives a divided
            output. "row" divides W's columns: a divided input gives a replicated output, summed over the processes, to which the
            undivided b is added once. "data" divides nothing.
        init: how W begins; None = a normal with Glorot's standard deviation √(2 / (in + out)).
        skip_bias_add: return (y, b) and leave the addition to the caller.
        sections: with "col", lengths of the stretches of the output that are divided each by itself.

    Shapes: (…, in_features) → (…, out_features).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        parallel: Parallel = "data",
        init: Initial | None = None,
        skip_bias_add: bool = False,
        sections: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if parallel not in ("data", "col", "row"):
            raise ConfigError(f'Linear: parallel="{parallel}"; one of "data", "col", "row"')
        if sections is not None and sum(sections) != out_features:
            raise ConfigError(f"Linear: sections {sections} add up to {sum(sections)}, not to out_features {out_features}")
        self.in_features, self.out_features = in_features, out_features
        self.parallel, self.skip_bias_add = parallel, skip_bias_add
        self.split: Split = WHOLE
        self.weight = nn.Parameter(torch.empty(self._weight_shape(), dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None
        self.initial = {
            "weight": init or Normal((2.0 / (in_features + out_features)) ** 0.5),
            "bias": Constant(0.0),
        }
        self.splits: dict[str, SplitRule] = self._rules(sections)
        self.fill_alone()

    def _weight_shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def _rules(self, sections: tuple[int, ...] | None) -> dict[str, SplitRule]:
        if self.parallel == "col":
            return {"weight": SplitRule(0, sections), "bias": SplitRule(0, sections)}
        return {"weight": SplitRule(1)} if self.parallel == "row" else {}

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self.weight, bias)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Apply the layer; see the class."""
        if self.parallel == "col":
            x = self.split.enter(x)
        if self.parallel == "row" and self.split.size > 1:
            y = self.split.leave(self._product(x, None))
            if self.skip_bias_add or self.bias is None:
                return (y, self.bias) if self.skip_bias_add else y
            return y + self.bias.to(y.dtype)
        if self.skip_bias_add:
            return self._product(x, None), self.bias
        return self._product(x, self.bias)

    def extra_repr(self) -> str:
        """Describe the layer for print(model)."""
        return f'{self.in_features}, {self.out_features}, bias={self.bias is not None}, parallel="{self.parallel}"'


class Conv1D(Linear):
    """A Linear whose weight is stored as (in, out), as the original GPT-2 checkpoints hold it."""

    def _weight_shape(self) -> tuple[int, int]:
        return self.in_features, self.out_features

    def _rules(self, sections: tuple[int, ...] | None) -> dict[str, SplitRule]:
        if self.parallel == "col":
            return {"weight": SplitRule(1, sections), "bias": SplitRule(0, sections)}
        return {"weight": SplitRule(0)} if self.parallel == "row" else {}

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self.weight.t(), bias)
