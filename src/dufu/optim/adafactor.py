"""Adafactor: second moments kept as one number a row and one a column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dufu.config.registry import register_optimizer
from dufu.errors import ConfigError
from dufu.optim.elementwise import moment, wide
from dufu.optim.whole import Part, Shape, WholeParameterOptimizer, matrix_of

ROW, COL = "row_second_moment", "col_second_moment"


@register_optimizer("adafactor")
class Adafactor(WholeParameterOptimizer):
    """Adaptive steps with sublinear memory (Shazeer and Stern, 2018).

    With row means r and column means c of the running average of g² + eps[0], whose decay at update t is 1 - t^decay_rate:
    u = g / √(r·c / mean(r)); u ← u / max(1, rms(u) / clip_threshold); p ← p - rate·u, where rate is lr, at most 1/√t with
    `relative_step`, times max(eps[1], rms(p)) with `scale_parameter`. A parameter is seen as the matrix (first dimension) × (all others);
    a vector is one column, for which the factored form is the full one. Means and rms go over the whole parameter: two messages a step.

    Args:
        params: parameters or groups.
        lr: learning rate, or its upper limit with `relative_step`.
        eps: (added to squared gradients, smallest rms of a parameter).
        clip_threshold: largest rms of an update.
        decay_rate: exponent of the second moment's decay.
        beta1: decay of a running average of the updates; None keeps none.
        weight_decay: share of the weight taken away each step, times lr.
        scale_parameter: whether the step is relative to the parameter's rms.
        relative_step: whether the step falls as 1/√t.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
    ) -> None:
        if decay_rate >= 0.0:
            raise ConfigError(f"Adafactor: decay_rate={decay_rate}; below 0, such as {-decay_rate or -0.8}")
        if clip_threshold <= 0.0:
            raise ConfigError(f"Adafactor: clip_threshold={clip_threshold}; above 0")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.eps, self.clip_threshold, self.decay_rate, self.beta1 = tuple(eps), clip_threshold, decay_rate, beta1
        self.scale_parameter, self.relative_step = scale_parameter, relative_step
        self._factors: _Factors | None = None

    def bind(self, parts: Mapping[Tensor, Sequence[Part]], shapes: Mapping[str, Shape], sum_: Callable[[Tensor], object]) -> None:
        """See WholeParameterOptimizer."""
        super().bind(parts, shapes, sum_)
        self._factors = _Factors(self.shapes, self.param_groups[0]["params"][0].device)

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """See WholeParameterOptimizer."""
        if self._factors is None:
            return {}
        return {ROW: dict(self._factors.rows), COL: dict(self._factors.cols)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update.

        Args:
            closure: computes the loss again, as PyTorch's optimizers allow.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tensors = self.settle()
        if self._factors is None:
            self._factors = _Factors(self.shapes, tensors[0].device)
        count = self._count(tensors)
        weights = {p: wide(p.detach()) for p in tensors}
        grads = {p: self.gradient(p) for p in tensors}
        sizes = self._take_squares(tensors, weights, grads, count)
        updates = self._updates(tensors, grads)
        shrink = (self._rms(tensors, updates) / self.clip_threshold).clamp(min=1.0)
        scales = dict(zip(self.shapes, (sizes / shrink).float().unbind()))
        for group in self.param_groups:
            rate = min(group["lr"], count**-0.5) if self.relative_step else group["lr"]
            for tensor in group["params"]:
                self._apply(tensor, weights[tensor], updates[tensor], scales, rate, 1.0 - group["lr"] * group["weight_decay"])
        return loss

    def _count(self, tensors: list[Tensor]) -> int:
        """Return the number of the update being made, from 1, and note it in every tensor's state."""
        count = 1 + int(max((float(self.state[p].get("step", 0.0)) for p in tensors), default=0.0))
        for tensor in tensors:
            self.state[tensor]["step"] = torch.tensor(float(count))
        return count

    def _take_squares(
        self, tensors: list[Tensor], weights: dict[Tensor, Tensor], grads: dict[Tensor, Tensor], count: int
    ) -> Tensor:
        """Take the squared gradients into the row and column means; return each parameter's scale max(eps[1], rms(p)) or 1."""
        factors = self._factors
        assert factors is not None
        packed = torch.zeros(factors.values.numel() + len(self.shapes), dtype=torch.float32, device=factors.values.device)
        rows, cols = factors.views(packed)
        squares = dict(zip(self.shapes, packed[factors.values.numel() :]))
        for tensor in tensors:
            for part in self.parts[tensor]:
                if not part.counted:
                    continue
                for row, col, block in part.rectangles(grads[tensor]):
                    square = block.square()
                    rows[part.name][row].add_(square.sum(1))
                    cols[part.name][col].add_(square.sum(0))
                if self.scale_parameter:
                    squares[part.name].add_(torch.linalg.vector_norm(part.of(weights[tensor])).square())
        self.sum_(packed)
        means = packed[: factors.values.numel()] / factors.divisors + self.eps[0]
        factors.values.lerp_(means, count**self.decay_rate)
        if not self.scale_parameter:
            return torch.ones(len(self.shapes), dtype=torch.float64, device=packed.device)
        return (packed[factors.values.numel() :] / factors.sizes).sqrt().clamp(min=self.eps[1])

    def _updates(self, tensors: list[Tensor], grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return the gradients divided by the root of their factored second moment."""
        factors = self._factors
        assert factors is not None
        rows, cols = factors.inverse_roots()
        found: dict[Tensor, Tensor] = {}
        for tensor in tensors:
            update = found[tensor] = torch.zeros_like(grads[tensor])
            for part in self.parts[tensor]:
                for (row, col, block), (_, _, out) in zip(part.rectangles(grads[tensor]), part.rectangles(update)):
                    torch.mul(block, rows[part.name][row, None], out=out)
                    if part.name in factors.matrices:
                        out.mul_(cols[part.name][None, col])
        return found

    def _rms(self, tensors: list[Tensor], updates: dict[Tensor, Tensor]) -> Tensor:
        """Return the root mean square of each parameter's update, in the order of `shapes`."""
        factors = self._factors
        assert factors is not None
        packed = torch.zeros(len(self.shapes), dtype=torch.float64, device=factors.values.device)
        squares = dict(zip(self.shapes, packed))
        for tensor in tensors:
            for part in self.parts[tensor]:
                if part.counted:
                    squares[part.name].add_(torch.linalg.vector_norm(part.of(updates[tensor])).square())
        self.sum_(packed)
        return (packed / factors.sizes).sqrt()

    def _apply(
        self, tensor: Tensor, weight: Tensor, update: Tensor, scales: Mapping[str, Tensor], rate: float, keep: float
    ) -> None:
        """Change one tensor by its update, scaled for each parameter that it holds."""
        if keep != 1.0:
            weight.mul_(keep)
        if self.beta1 is None:
            for part in self.parts[tensor]:
                part.of(weight).addcmul_(part.of(update), scales[part.name], value=-rate)
        else:
            state = self.state[tensor]
            if "exp_avg" not in state:
                state["exp_avg"] = moment(tensor)
            for part in self.parts[tensor]:
                part.of(update).mul_(scales[part.name] * rate)
            weight.sub_(state["exp_avg"].lerp_(update, 1.0 - self.beta1))
        if weight.dtype != tensor.dtype:
            tensor.copy_(weight)


class _Factors:
    """The row and column means of every parameter, in one flat tensor that is the same on every process."""

    def __init__(self, shapes: Mapping[str, Shape], device: torch.device) -> None:
        self.matrices = {name for name, shape in shapes.items() if matrix_of(shape)[1] > 1}
        self._shapes = {name: matrix_of(shape) for name, shape in shapes.items()}
        self.values = torch.zeros(sum(rows + cols for rows, cols in self._shapes.values()), device=device)
        self.divisors = torch.zeros_like(self.values)  # of sums along rows the number of columns, and the other way round
        divide_rows, divide_cols = self.views(self.divisors)
        for name, (rows, cols) in self._shapes.items():
            divide_rows[name].fill_(cols)
            divide_cols[name].fill_(rows)
        self.sizes = torch.tensor([max(1, r * c) for r, c in self._shapes.values()], dtype=torch.float64, device=device)
        self.rows, self.cols = self.views(self.values)

    def views(self, flat: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the stretches of a tensor like `values`: of rows and of columns, by parameter."""
        rows, cols, offset = {}, {}, 0
        for name, (height, width) in self._shapes.items():
            rows[name] = flat[offset : offset + height]
            cols[name] = flat[offset + height : offset + height + width]
            offset += height + width
        return rows, cols

    def inverse_roots(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return 1/√r, for matrices times √mean(r), and 1/√c."""
        rows, cols = self.views(self.values.rsqrt())
        for name in self.matrices:
            rows[name] = rows[name] * self.rows[name].mean().sqrt()
        return rows, cols
