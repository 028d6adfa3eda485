"""Swin and Swin V2: attention in shifted windows, on grids of patches that are merged from stage to stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.errors import ConfigError
from dufu.layers.attention import Attention
from dufu.layers.dropout import Dropout, DropPath
from dufu.layers.initial import Constant, Described, Initial, Normal
from dufu.layers.linear import Linear
from dufu.layers.mlp import MLP
from dufu.layers.norm import LayerNorm
from dufu.layers.patch import PatchEmbedding
from dufu.layers.window import ContinuousWindowBias, CosineAttention, WindowBias, WindowGrid
from dufu.models.chain import Batch, ChainModel, Sums
from dufu.models.pictures import LABELS, check_classes, check_tokens, count_pictures, pixels_of, score_classes, stochastic_depth


class SwinEmbedding(Described):
    """Patches, a norm, perhaps positions, dropout: pixels (B, C, H, W) → (B, T, embed_dim)."""

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        normed: bool,
        positions: bool,
        dropout: float,
        init: Normal,
    ) -> None:
        super().__init__()
        self.patch = PatchEmbedding(img_size, patch_size, in_chans, embed_dim, init=init)
        self.norm = LayerNorm(embed_dim) if normed else None
        self.position = nn.Parameter(torch.empty(1, self.patch.num_patches, embed_dim)) if positions else None
        self.initial: dict[str, Initial] = {"position": init}
        self.dropout = Dropout(dropout)
        self.fill_alone()

    def forward(self, state: None, batch: Batch) -> Tensor:
        """Embed the batch's pictures."""
        hidden = self.patch(pixels_of(batch))
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.position is not None:
            hidden = hidden + self.position
        embedded: Tensor = self.dropout(hidden, batch.keys)
        return embedded


class PatchMerging(nn.Module):
    """Each square of four patches becomes one of twice the width: (B, side², C) → (B, (side / 2)², 2 C).

    Args:
        side, width: of the grid before.
        norm_first: norm before the projection, as in Swin; False = after it, as in V2.
    """

    def __init__(self, side: int, width: int, norm_first: bool, init: Normal) -> None:
        super().__init__()
        self.side, self.norm_first = side, norm_first
        self.norm = LayerNorm(4 * width if norm_first else 2 * width)
        self.reduction = Linear(4 * width, 2 * width, bias=False, init=init)

    def forward(self, hidden: Tensor) -> Tensor:
        """Merge."""
        grid = hidden.unflatten(1, (self.side, self.side))
        four = torch.cat([grid[:, row::2, column::2] for column in range(2) for row in range(2)], -1).flatten(1, 2)
        merged: Tensor = self.reduction(self.norm(four)) if self.norm_first else self.norm(self.reduction(four))
        return merged


class SwinUnit(nn.Module):
    """A layer as a unit of the chain; the first one of a stage merges patches before.

    Args:
        grid: how the patches are cut into windows.
        width, ffn_width, heads: sizes.
        version: 1: scaled products, a table of biases, norms before the branches; 2: cosines, computed biases, norms after them.
        trained_window: see ContinuousWindowBias.
        merging: before the layer.
        others: as in SwinTransformer.
    """

    def __init__(
        self,
        grid: WindowGrid,
        width: int,
        ffn_width: int,
        heads: int,
        version: int,
        trained_window: int,
        merging: PatchMerging | None,
        qkv_bias: bool,
        dropout: float,
        attention_dropout: float,
        drop_path: float,
        epsilon: float,
        activation: str,
        init: Normal,
        init_scale: float,
    ) -> None:
        super().__init__()
        self.grid, self.version, self.merging = grid, version, merging
        self.tokens = grid.side**2  # that it computes, for the balance of a pipeline
        self.attention: Attention
        self.bias: nn.Module
        if version == 1:
            self.attention = Attention(
                width, heads, attention_dropout_prob=attention_dropout, bias=qkv_bias, output_bias=True, init=init
            )
            self.bias = WindowBias(grid.window, heads, init)
        else:
            self.attention = CosineAttention(width, heads, qkv_bias, attention_dropout_prob=attention_dropout, init=init)
            self.bias = ContinuousWindowBias(grid.window, heads, trained_window, init)
        self.attention_norm, self.mlp_norm = LayerNorm(width, epsilon), LayerNorm(width, epsilon)
        self.attention_dropout, self.mlp_dropout = Dropout(dropout), Dropout(dropout)
        self.attention_drop_path, self.mlp_drop_path = DropPath(drop_path), DropPath(drop_path)
        self.mlp = MLP(width, ffn_width, activation, init=init)
        if version == 2:
            for norm in (self.attention_norm, self.mlp_norm):
                norm.initial["weight"] = Constant(init_scale)
                norm.fill_alone()

    def _attend(self, hidden: Tensor, keys: Tensor | None) -> Tensor:
        windows = self.grid.cut(hidden)
        mask = self.grid.mask(len(hidden), hidden.device)
        own_keys = None if keys is None else self.grid.cut(keys)
        bias = self.bias().to(hidden.dtype)
        return self.grid.join(self.attention(windows, mask, own_keys, bias=bias))

    def forward(self, state: Tensor, batch: Batch) -> Tensor:
        """(B, side², width) → the same; of the grid before, where the layer merges first."""
        if self.merging is not None:
            state = self.merging(state)
        keys = None if batch.keys is None else batch.keys[:, : state.shape[1]]
        before = self.version == 1
        branch = self.attention_dropout(self._attend(self.attention_norm(state) if before else state, keys), keys)
        state = state + self.attention_drop_path(branch if before else self.attention_norm(branch), keys)
        branch = self.mlp_dropout(self.mlp(self.mlp_norm(state) if before else state), keys)
        hidden: Tensor = state + self.mlp_drop_path(branch if before else self.mlp_norm(branch), keys)
        return hidden


class SwinHead(nn.Module):
    """Final norm, the mean over the patches, then the scores of the classes; without classes the normed patches and their mean."""

    def __init__(self, width: int, num_classes: int, epsilon: float, label_smoothing: float, init: Normal) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.norm = LayerNorm(width, epsilon)
        self.classes = Linear(width, num_classes, init=init) if num_classes else None

    def forward(self, state: Tensor, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Sums when the batch has labels, otherwise the scores (B, classes), or hidden states (B, T, width) and their mean."""
        hidden = self.norm(state)
        pooled = hidden.mean(1)
        if self.classes is None:
            if LABELS in batch.extra:
                raise ConfigError("model.cfg.num_classes=0: a model without a class head has no loss; give it classes")
            return {"hidden": hidden, "pooled": pooled}
        scores: Tensor = self.classes(pooled)
        if LABELS not in batch.extra:
            return scores
        sums: Sums = score_classes(scores, batch, self.label_smoothing if self.training else 0.0)
        return sums


class _Swin(ChainModel):
    """What both versions share: the embedding, the layers of all stages, the head."""

    causal = False
    shares_positions = False  # windows lie across any stretch of positions
    objectives: dict[str, str] = {"loss": "samples"}  # noqa: RUF012 - as in ChainModel

    def _build(
        self,
        version: int,
        img_size: int,
        patch_size: int,
        in_chans: int,
        num_classes: int | None,
        embed_dim: int,
        depths: Sequence[int],
        num_heads: Sequence[int],
        window_size: int,
        mlp_ratio: float,
        qkv_bias: bool,
        drop_rate: float,
        attn_drop_rate: float,
        drop_path_rate: float,
        ape: bool,
        patch_norm: bool,
        label_smoothing: float,
        layernorm_epsilon: float,
        initializer_range: float,
        activation: str,
        pretrained_window_sizes: Sequence[int],
        init_scale: float,
    ) -> None:
        classes, init = check_classes(num_classes, label_smoothing), Normal(initializer_range)
        stages = len(depths)
        if len(num_heads) != stages or len(pretrained_window_sizes) != stages or min(depths, default=0) < 1:
            raise ConfigError(
                f"model.cfg.depths={list(depths)}, num_heads={list(num_heads)}: one number of at least 1 for each stage in both"
                + ("" if version == 1 else f", and in pretrained_window_sizes={list(pretrained_window_sizes)}")
            )
        side = img_size // patch_size
        if side % 2 ** (stages - 1):
            need = patch_size * 2 ** (stages - 1)
            raise ConfigError(
                f"model.cfg.img_size={img_size}: {stages} stages halve the grid of {side} patches {stages - 1} times; "
                f"a multiple of {need}, such as {max(1, round(img_size / need)) * need}"
            )
        self.img_size, self.patch_size, self.num_classes = img_size, patch_size, classes
        self.max_seq_length = window_size**2  # of the sequences that attend to each other
        self.embedding = SwinEmbedding(img_size, patch_size, in_chans, embed_dim, patch_norm, ape, drop_rate, init)
        drops = iter(stochastic_depth(drop_path_rate, sum(depths)))
        self.layers = nn.ModuleList()
        for stage, (depth, heads) in enumerate(zip(depths, num_heads)):
            own_side, width = side // 2**stage, embed_dim * 2**stage
            for index in range(depth):
                first = stage and not index
                self.layers.append(
                    SwinUnit(
                        WindowGrid(own_side, window_size, window_size // 2 if index % 2 else 0),
                        width,
                        int(width * mlp_ratio),
                        heads,
                        version,
                        int(pretrained_window_sizes[stage]),
                        PatchMerging(2 * own_side, width // 2, version == 1, init) if first else None,
                        qkv_bias,
                        drop_rate,
                        attn_drop_rate,
                        next(drops),
                        layernorm_epsilon,
                        activation,
                        init,
                        init_scale,
                    )
                )
        self.head = SwinHead(embed_dim * 2 ** (stages - 1), classes, layernorm_epsilon, label_smoothing, init)
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
        check_tokens(batch, self.embedding.patch.num_patches, self.img_size, self.patch_size)
        return super().prepare(batch)


@register_model("swin")
class SwinTransformer(_Swin):
    """Swin for classifying pictures (Liu et al., "Swin transformer", 2021).

    Batches as in `dufu.models.pictures`; T = (img_size / patch_size)².

    Args:
        img_size, patch_size: side lengths in pixels; patches tile the picture, and all stages but the first halve their grid.
        in_chans: colours.
        num_classes: classes; None = the data's; 0 = no class head, but hidden states.
        embed_dim: width of the first stage; each later one has twice the width.
        depths: layers of each stage.
        num_heads: attention heads of each stage.
        window_size: patches of a window's side.
        mlp_ratio: inner width of the feed-forward parts, in widths.
        qkv_bias: whether queries, keys and values have biases.
        drop_rate: dropout after the embedding and on each branch.
        attn_drop_rate: dropout on attention probabilities.
        drop_path_rate: probability of dropping a branch of the last layer; it grows evenly from 0 in the first.
        ape: whether patches have learned positions too.
        patch_norm: whether there is a norm after the patch embedding.
        label_smoothing: share of a target's probability spread evenly over the classes, in training.
        layernorm_epsilon: added to the variance in the norms of the layers and of the head.
        initializer_range: standard deviation of the initial weights.
        activation: of the feed-forward parts.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    @configurable
    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int | None = None,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window_size: int = 7,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        ape: bool = False,
        patch_norm: bool = True,
        label_smoothing: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        self._build(
            1, img_size, patch_size, in_chans, num_classes, embed_dim, depths, num_heads, window_size, mlp_ratio, qkv_bias, drop_rate,
            attn_drop_rate, drop_path_rate, ape, patch_norm, label_smoothing, layernorm_epsilon, initializer_range, activation,
            [0] * len(depths), 1.0,
        )  # fmt: skip


@register_model("swinv2")
class SwinTransformerV2(_Swin):
    """Swin V2 for classifying pictures (Liu et al., "Swin transformer V2: scaling up capacity and resolution", 2021).

    Args:
        pretrained_window_sizes: of each stage the window that its biases were trained with; 0 = its own.
        qkv_bias: whether queries and values have biases.
        init_scale: what the norms after the branches begin with; at 0 every branch begins as nothing, as it was published.
        others: those of SwinTransformer.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    @configurable
    def __init__(
        self,
        img_size: int = 256,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int | None = None,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window_size: int = 8,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        ape: bool = False,
        patch_norm: bool = True,
        pretrained_window_sizes: Sequence[int] | None = None,
        label_smoothing: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        init_scale: float = 0.0,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        self._build(
            2, img_size, patch_size, in_chans, num_classes, embed_dim, depths, num_heads, window_size, mlp_ratio, qkv_bias, drop_rate,
            attn_drop_rate, drop_path_rate, ape, patch_norm, label_smoothing, layernorm_epsilon, initializer_range, activation,
            [0] * len(depths) if pretrained_window_sizes is None else pretrained_window_sizes, init_scale,
        )  # fmt: skip


__all__ = ["SwinTransformer", "SwinTransformerV2"]
