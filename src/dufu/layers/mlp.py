"""The feed-forward part of a transformer layer, plain and gated."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from dufu.errors import ConfigError, nearest
from dufu.layers.dropout import Dropout
from dufu.layers.initial import Initial
from dufu.layers.linear import Linear


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "silu": functional.silu,
    "relu": functional.relu,
    "squared_relu": lambda x: functional.relu(x).square(),
    "leaky_relu": functional.leaky_relu,
    "tanh": lambda x: x.tanh(),
    None: _identity,
}


def build_activation(name: str | None) -> Callable[[Tensor], Tensor]:
    """Return the activation function of that name; None is the identity."""
    if name not in ACTIVATIONS:
        raise ConfigError(f'no activation is called "{name}"{nearest(str(name), [k for k in ACTIVATIONS if k])}')
    return ACTIVATIONS[name]


def drop_part(x: Tensor, dropout: Dropout | None, keys: Tensor | None, following: Linear) -> Tensor:
    """Drop some of the inner features, of which a process holds those that the layer after them is split by."""
    return x if dropout is None else dropout.part(x, keys, following.split.rank * x.shape[-1])


class MLP(nn.Module):
    """W₂ act(W₁ x), the inner features divided over tensor-parallel processes.

    Args:
        hidden_size, ffn_hidden_size: outer and inner width.
        activation: a name in `ACTIVATIONS`.
        bias: whether the layers have biases.
        init, output_init: how W₁ and W₂ begin.
        dropout: on the inner features, before W₂.

    Shapes: (…, hidden_size), and dropout keys (…) → (…, hidden_size).
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        activation: str | None = "gelu",
        bias: bool = True,
        init: Initial | None = None,
        output_init: Initial | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation = build_activation(activation)
        self.expand = Linear(hidden_size, ffn_hidden_size, bias, "col", init)
        self.contract = Linear(ffn_hidden_size, hidden_size, bias, "row", output_init or init)
        self.dropout = Dropout(dropout) if dropout else None

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Apply the block."""
        y: Tensor = self.contract(drop_part(self.activation(self.expand(x)), self.dropout, keys, self.contract))
        return y


class GatedMLP(nn.Module):
    """W₂ (act(W_g x) · W_u x) (Shazeer, "GLU variants improve transformer", 2020); the arguments are those of MLP."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        activation: str | None = "silu",
        bias: bool = False,
        init: Initial | None = None,
        output_init: Initial | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation = build_activation(activation)
        sections = (ffn_hidden_size, ffn_hidden_size)
        self.gate_up = Linear(hidden_size, 2 * ffn_hidden_size, bias, "col", init, sections=sections)
        self.contract = Linear(ffn_hidden_size, hidden_size, bias, "row", output_init or init)
        self.dropout = Dropout(dropout) if dropout else None

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Apply the block."""
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = self.contract(drop_part(self.activation(gate) * up, self.dropout, keys, self.contract))
        return y
