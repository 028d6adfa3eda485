"""ViT: a picture as a sequence of patches and a class token, through a pre-norm transformer encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.errors import ConfigError
from dufu.layers.dropout import Dropout
from dufu.layers.head import Pooler
from dufu.layers.initial import Described, Initial, Normal
from dufu.layers.linear import Linear
from dufu.layers.norm import LayerNorm
from dufu.layers.patch import PatchEmbedding
from dufu.models.chain import Batch, ChainModel, Sums, TransformerUnit
from dufu.models.pictures import (
    LABELS,
    check_classes,
    check_tokens,
    count_pictures,
    pixels_of,
    score_classes,
    stochastic_depth,
)


class ViTEmbedding(Described):
    """Class token and patches, plus positions, then dropout: pixels (B, C, H, W) → (B, T, hidden).

    Where processes share the positions of a picture, each embeds all patches and keeps its own.
    """

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, dropout: float, init: Normal) -> None:
        super().__init__()
        self.patch = PatchEmbedding(img_size, patch_size, in_chans, embed_dim, init=init)
        self.tokens = self.patch.num_patches + 1
        # Of these shapes in every published checkpoint.
        self.class_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.position = nn.Parameter(torch.empty(1, self.tokens, embed_dim))
        self.initial: dict[str, Initial] = {"class_token": init, "position": init}
        self.dropout = Dropout(dropout)
        self.fill_alone()

    def forward(self, state: None, batch: Batch) -> Tensor:
        """Embed the batch's pictures."""
        patches = self.patch(pixels_of(batch))
        hidden = torch.cat((self.class_token.to(patches.dtype).expand(len(patches), 1, -1), patches), 1) + self.position
        hidden = functional.pad(hidden, (0, 0, 0, batch.length - self.tokens))  # tokens that a layout adds are not attended to
        if batch.places is not None:
            hidden = hidden.index_select(1, batch.places)
        embedded: Tensor = self.dropout(self.dropout.stream.own(hidden), batch.keys)
        return embedded


class ViTHead(nn.Module):
    """Final norm, then the scores of the classes from the class token; without classes the hidden states, or the pooled class token."""

    def __init__(
        self, embed_dim: int, num_classes: int, epsilon: float, pooler: bool, label_smoothing: float, init: Normal
    ) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.norm = LayerNorm(embed_dim, epsilon)
        self.pooler = Pooler(embed_dim, init=init) if pooler else None
        self.classes = Linear(embed_dim, num_classes, init=init) if num_classes else None

    def forward(self, state: Tensor, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Sums when the batch has labels, otherwise the scores (B, classes), or the normed hidden states (B, T, hidden)."""
        if self.classes is None:
            return self._features(state, batch)
        first = self.norm(state[:, :1])
        scores: Tensor = self.classes(first[:, 0] if self.pooler is None else self.pooler(first))
        if LABELS not in batch.extra:
            return scores
        sums: Sums = score_classes(scores, batch, self.label_smoothing if self.training else 0.0)
        return sums

    def _features(self, state: Tensor, batch: Batch) -> Tensor | dict[str, Tensor]:
        if LABELS in batch.extra:
            raise ConfigError("model.cfg.num_classes=0: a model without a class head has no loss; give it classes")
        hidden: Tensor = self.norm(state)
        return hidden if self.pooler is None else {"hidden": hidden, "pooled": self.pooler(hidden)}


@register_model("vit")
class VisionTransformer(ChainModel):
    """ViT for classifying pictures (Dosovitskiy et al., "An image is worth 16x16 words", 2020).

    Batches as in `dufu.models.pictures`; T = (img_size / patch_size)² + 1, the class token first.

    Args:
        img_size, patch_size: side lengths in pixels; patches tile the picture.
        in_chans: colours.
        embed_dim: width.
        depth: number of layers.
        num_heads: attention heads.
        mlp_ratio: inner width of the feed-forward part, in widths.
        drop_rate: dropout after the embedding and on each branch before it is added.
        attn_drop_rate: dropout on attention probabilities.
        drop_path_rate: probability of dropping a branch of the last layer; it grows evenly from 0 in the first.
        num_classes: classes; None = the data's; 0 = no class head, but hidden states.
        pooler: whether the class token passes through a dense layer with tanh before the head.
        label_smoothing: share of a target's probability spread evenly over the classes, in training.
        layernorm_epsilon: added to the variance in the norms.
        initializer_range: standard deviation of the initial weights.
        activation: of the feed-forward part.

    Raises:
        ConfigError: patches that do not tile the picture, or an impossible number of classes.
    """

    causal = False
    objectives: dict[str, str] = {"loss": "samples"}  # noqa: RUF012 - as in ChainModel

    @configurable
    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        num_classes: int | None = None,
        pooler: bool = False,
        label_smoothing: float = 0.0,
        layernorm_epsilon: float = 1e-6,
        initializer_range: float = 0.02,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        classes, init = check_classes(num_classes, label_smoothing), Normal(initializer_range)
        self.img_size, self.patch_size, self.num_classes = img_size, patch_size, classes
        self.embedding = ViTEmbedding(img_size, patch_size, in_chans, embed_dim, drop_rate, init)
        self.max_seq_length = self.embedding.tokens
        self.layers = nn.ModuleList(
            TransformerUnit(
                index,
                hidden_size=embed_dim,
                ffn_hidden_size=round(embed_dim * mlp_ratio),
                num_attention_heads=num_heads,
                attention_dropout_prob=attn_drop_rate,
                output_dropout_prob=drop_rate,
                drop_path_prob=drop_path,
                layernorm_epsilon=layernorm_epsilon,
                activation=activation,
                init=init,
            )
            for index, drop_path in enumerate(stochastic_depth(drop_path_rate, depth))
        )
        self.head = ViTHead(embed_dim, classes, layernorm_epsilon, pooler, label_smoothing, init)
        self.finish()

    @staticmethod
    def picture_tokens(cfg: Mapping[str, Any]) -> int:
        """Return T, given complete arguments."""
        return (int(cfg["img_size"]) // int(cfg["patch_size"])) ** 2 + 1

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
        if batch.held is None and batch.padding is None:
            check_tokens(batch, self.embedding.tokens, self.img_size, self.patch_size)
        return super().prepare(batch)


__all__ = ["VisionTransformer"]
