"""ResMLP: patches mixed by one linear map over positions and one feed-forward part over features, with affine maps for norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.layers.dropout import Dropout, DropPath
from dufu.layers.initial import Constant, Described, Initial, Normal
from dufu.layers.linear import Linear
from dufu.layers.mlp import MLP
from dufu.layers.patch import PatchEmbedding
from dufu.models.chain import Batch, ChainModel, Sums
from dufu.models.pictures import LABELS, check_classes, check_tokens, count_pictures, pixels_of, score_classes


class Affine(Described):
    """weight · x + bias over the last dimension, without any statistics: (…, width) → the same."""

    is_norm = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.initial: dict[str, Initial] = {"weight": Constant(1.0), "bias": Constant(0.0)}
        self.fill_alone()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map."""
        return torch.addcmul(self.bias, self.weight, x)


class BranchScale(Described):
    """A learned factor of each feature of a branch (Touvron et al., "Going deeper with image transformers", 2021)."""

    def __init__(self, width: int, begin: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.initial: dict[str, Initial] = {"weight": Constant(begin)}
        self.fill_alone()

    def forward(self, x: Tensor) -> Tensor:
        """Scale (…, width)."""
        return self.weight * x


class ResMLPEmbedding(nn.Module):
    """Patches: pixels (B, C, H, W) → (B, T, embed_dim)."""

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, init: Normal) -> None:
        super().__init__()
        self.patch = PatchEmbedding(img_size, patch_size, in_chans, embed_dim, init=init)

    def forward(self, state: None, batch: Batch) -> Tensor:
        """Embed the batch's pictures."""
        patches: Tensor = self.patch(pixels_of(batch))
        return patches


class ResMLPUnit(nn.Module):
    """x + γ₁ · (map over positions of affine(x)), then x + γ₂ · mlp(affine(x)): (B, T, width) → the same."""

    def __init__(
        self,
        patches: int,
        width: int,
        ffn_width: int,
        scale: float,
        dropout: float,
        drop_path: float,
        activation: str,
        init: Normal,
    ) -> None:
        super().__init__()
        self.patch_norm, self.mlp_norm = Affine(width), Affine(width)
        self.patches = Linear(patches, patches, init=init)
        self.mlp = MLP(width, ffn_width, activation, init=init)
        self.patch_scale, self.mlp_scale = BranchScale(width, scale), BranchScale(width, scale)
        self.mlp_dropout = Dropout(dropout)
        self.patch_drop_path, self.mlp_drop_path = DropPath(drop_path), DropPath(drop_path)

    def forward(self, state: Tensor, batch: Batch) -> Tensor:
        """Apply the layer."""
        branch = self.patches(self.patch_norm(state).transpose(1, 2)).transpose(1, 2)  # type: ignore[union-attr]
        state = state + self.patch_drop_path(self.patch_scale(branch), batch.keys)
        branch = self.mlp_dropout(self.mlp(self.mlp_norm(state)), batch.keys)
        hidden: Tensor = state + self.mlp_drop_path(self.mlp_scale(branch), batch.keys)
        return hidden


class ResMLPHead(nn.Module):
    """Affine map, mean over the patches, scores of the classes."""

    def __init__(self, width: int, num_classes: int, label_smoothing: float, init: Normal) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.norm = Affine(width)
        self.classes = Linear(width, num_classes, init=init)

    def forward(self, state: Tensor, batch: Batch) -> Tensor | Sums:
        """Sums when the batch has labels, otherwise the scores (B, classes)."""
        scores: Tensor = self.classes(self.norm(state).mean(1))  # type: ignore[assignment]
        if LABELS not in batch.extra:
            return scores
        return score_classes(scores, batch, self.label_smoothing if self.training else 0.0)


@register_model("resmlp")
class ResMLP(ChainModel):
    """ResMLP for classifying pictures (Touvron et al., 2021).

    Batches as in `dufu.models.pictures`; T = (img_size / patch_size)². Tensor parallelism divides the feed-forward parts; the maps over
    positions, which hold T² weights each, are whole on every process.

    Args:
        img_size, patch_size: side lengths in pixels; patches tile the picture.
        in_chans: colours.
        embed_dim: width.
        depth: number of layers.
        mlp_ratio: inner width of the feed-forward part, in widths.
        drop_rate: dropout on the feed-forward branches.
        drop_path_rate: probability of dropping a branch, the same in every layer.
        init_scale: what the factors of the branches begin with.
        num_classes: classes; None = the data's.
        label_smoothing: share of a target's probability spread evenly over the classes, in training.
        initializer_range: standard deviation of the initial weights.
        activation: of the feed-forward part.

    Raises:
        ConfigError: patches that do not tile the picture, or an impossible number of classes.
    """

    causal = False
    shares_positions = False  # every position is mixed with every other by weights of their places
    objectives: dict[str, str] = {"loss": "samples"}  # noqa: RUF012 - as in ChainModel

    @configurable
    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 384,
        depth: int = 12,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        init_scale: float = 1e-4,
        num_classes: int | None = None,
        label_smoothing: float = 0.0,
        initializer_range: float = 0.02,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        classes, init = check_classes(num_classes, label_smoothing, headless=False), Normal(initializer_range)
        self.img_size, self.patch_size, self.num_classes = img_size, patch_size, classes
        self.embedding = ResMLPEmbedding(img_size, patch_size, in_chans, embed_dim, init)
        patches = self.max_seq_length = self.embedding.patch.num_patches
        inner = int(embed_dim * mlp_ratio)
        self.layers = nn.ModuleList(
            ResMLPUnit(patches, embed_dim, inner, init_scale, drop_rate, drop_path_rate, activation, init) for _ in range(depth)
        )
        self.head = ResMLPHead(embed_dim, classes, label_smoothing, init)
        self.finish()

    @staticmethod
    def picture_tokens(cfg: Mapping[str, Any]) -> int:
        """Return T, given complete arguments."""
        return (int(cfg["img_size"]) // int(cfg["patch_size"])) ** 2

    def units(self) -> dict[str, nn.Module]:
        """Return embedding, layers and head by name."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"embedding": self.embedding, **layers, "head": self.head}

    def counts(self, batch: Batch) -> dict[str, int]:
        """See ChainModel."""
        return count_pictures(batch)

    def prepare(self, batch: Batch) -> Batch:
        """See ChainModel.

        Raises:
            DataError: samples of another number of tokens than a picture has.
        """
        check_tokens(batch, self.max_seq_length, self.img_size, self.patch_size)
        return super().prepare(batch)


__all__ = ["ResMLP"]
