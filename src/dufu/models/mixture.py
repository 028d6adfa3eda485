"""Mixture-of-experts layers of a model: their settings, and what they need to know of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dufu.errors import ConfigError
from dufu.layers.initial import Initial
from dufu.layers.loss import IGNORE
from dufu.layers.moe import MixtureOfExperts
from dufu.layers.router import Routing, Scoring
from dufu.models.chain import Batch

State = (
    Tensor | tuple[Tensor, Tensor]
)  # the hidden states; after the first layer that has routing losses also their sums so far, (2,)


@dataclass(frozen=True)
class Mixture:
    """Settings of a model's mixture layers, without the sizes that they share with its other layers.

    Args:
        num_experts: experts of each mixture layer.
        top_k: experts of each token.
        ffn_hidden_size: inner width of one expert; None = that of the dense layers.
        shared_experts: experts' widths that all tokens share.
        shared_gate: whether what they add is gated.
        first_dense_layers: layers from the first that are dense.
        scoring, renormalize, scale: see layers.router.Router.
        capacity_factor, balance: see layers.moe.MixtureOfExperts.
        balance_weight, z_weight: factors of the routing losses, which the layers' sum.
    """

    num_experts: int
    top_k: int = 2
    ffn_hidden_size: int | None = None
    shared_experts: int = 0
    first_dense_layers: int = 0
    scoring: Scoring = "softmax"
    renormalize: bool | None = None
    scale: float = 1.0
    capacity_factor: float | None = None
    balance: str = "sample"
    balance_weight: float = 0.01
    z_weight: float = 0.001
    shared_gate: bool = False

    def layer(
        self,
        index: int,
        hidden_size: int,
        ffn_hidden_size: int,
        activation: str,
        gated: bool,
        init: Initial,
        output_init: Initial,
    ) -> MixtureOfExperts | None:
        """Return the mixture of layer `index`, None where the layer is dense."""
        if index < self.first_dense_layers:
            return None
        return MixtureOfExperts(
            hidden_size,
            self.ffn_hidden_size or ffn_hidden_size,
            self.num_experts,
            self.top_k,
            activation,
            gated,
            self.shared_experts,
            self.scoring,
            self.renormalize,
            self.scale,
            capacity_factor=self.capacity_factor,
            balance=self.balance,
            balance_weight=self.balance_weight,
            z_weight=self.z_weight,
            init=init,
            output_init=output_init,
            shared_gate=self.shared_gate,
        )

    @property
    def losses(self) -> dict[str, int]:
        """Return the routing losses that are part of the objective, and their place in `Routing.losses`."""
        weights = {"balance_loss": self.balance_weight, "z_loss": self.z_weight}
        return {name: place for place, (name, weight) in enumerate(weights.items()) if weight}


def mixture_from(num_experts: int, hidden_layers: int, **settings: Any) -> Mixture | None:
    """Return the mixture that a model's arguments describe, None when `num_experts` is 0.

    Args:
        hidden_layers: the model's layers.
        settings: the `moe_` arguments without the prefix; None = Mixture's default.

    Raises:
        ConfigError: a setting without experts, or no layer that would have them.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if num_experts == 0:
        if given:
            name, value = next(iter(given.items()))
            raise ConfigError(
                f"model.cfg.moe_{name}={value!r} but model.cfg.num_experts=0; set the number of experts, or moe_{name}=null"
            )
        return None
    mixture = Mixture(num_experts, **given)
    if not 0 <= mixture.first_dense_layers < hidden_layers:
        raise ConfigError(
            f"model.cfg.moe_first_dense_layers={mixture.first_dense_layers} of {hidden_layers} layers: from 0 to {hidden_layers - 1}, "
            f"or num_experts=0"
        )
    if mixture.shared_experts < 0:
        raise ConfigError(f"model.cfg.moe_shared_experts={mixture.shared_experts}: 0 or more")
    return mixture


def split_state(state: State) -> tuple[Tensor, Tensor | None]:
    """Return the hidden states and the routing losses so far."""
    return state if isinstance(state, tuple) else (state, None)


def routing_of(batch: Batch, losses: Tensor | None) -> Routing:
    """Return what mixture layers know of a prepared batch.

    A capacity is kept to where a batch is scored: generated text has no length yet that a capacity could be a share of.
    """
    scored = None if batch.labels is None else batch.labels != IGNORE
    return Routing(
        real=real_tokens(batch),
        scored=scored,
        places=batch.places,
        limited=scored is not None,
        losses=losses,
    )


def real_tokens(batch: Batch) -> Tensor | None:
    """Return (B, T) bool, which of this process's tokens are no padding; None when all are real."""
    places = batch.places
    if batch.padding is not None:
        padding = batch.padding.bool()
        return padding[:, -batch.input_ids.shape[1] :] if places is None else padding[:, places]
    if "lengths" in batch.extra:  # samples were padded only so that their positions divide
        if places is None:
            places = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
        return places < batch.extra["lengths"].unsqueeze(-1)
    return None
