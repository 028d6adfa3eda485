"""CLIP: a tower for pictures and one for texts, whose outputs are compared by their cosines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dufu.config.configurable import configurable
from dufu.config.registry import register_model
from dufu.errors import ConfigError, LayoutError, NotBuiltError
from dufu.layers.embedding import VocabEmbedding
from dufu.layers.initial import Constant, Described, Initial, Normal
from dufu.layers.linear import Linear
from dufu.layers.mask import Mask
from dufu.layers.norm import LayerNorm
from dufu.layers.patch import PatchEmbedding
from dufu.layers.position import LearnedPositionalEmbedding
from dufu.layers.transformer import TransformerLayer
from dufu.models.chain import Batch, ChainModel
from dufu.models.pictures import pixels_of

Towers = dict[str, Tensor]  # "picture" (N, patches + 1, width) and "text" (M, T, width)
_NO_TRAINING = (
    "CLIP's contrastive loss compares every picture with all texts of the global batch, across processes and micro-batches, which is not "
    "built; CLIP encodes pictures and texts, in any layout without shared positions"
)


class CLIPEmbedding(Described):
    """Patches with a class token and positions, normed; words with positions."""

    def __init__(
        self, img_size: int, patch_size: int, in_chans: int, vision_width: int, vocab_size: int, length: int, width: int,
        epsilon: float, init: Normal,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patch = PatchEmbedding(img_size, patch_size, in_chans, vision_width, init=init, bias=False)
        self.class_token = nn.Parameter(torch.empty(vision_width))
        self.picture_position = LearnedPositionalEmbedding(self.patch.num_patches + 1, vision_width, init=init)
        self.picture_norm = LayerNorm(vision_width, epsilon)
        self.word = VocabEmbedding(vocab_size, width, init=init)
        self.text_position = LearnedPositionalEmbedding(length, width, init=init)
        self.initial: dict[str, Initial] = {"class_token": Normal(vision_width**-0.5)}
        self.fill_alone()

    def forward(self, state: None, batch: Batch) -> Towers:
        """Embed the batch's pictures and texts."""
        patches = self.patch(pixels_of(batch))
        first = self.class_token.to(patches.dtype).expand(len(patches), 1, -1)
        places = torch.arange(self.patch.num_patches + 1, device=patches.device)
        picture = self.picture_norm(torch.cat((first, patches), 1) + self.picture_position(places))
        return {"picture": picture, "text": self.word(batch.input_ids) + self.text_position(batch.positions)}


class TowerUnit(nn.Module):
    """A layer of one tower as a unit of the chain; the other tower's state passes.

    Args:
        tower: "picture" or "text".
        tokens: of its tower, for the balance of a pipeline.
        arguments: those of TransformerLayer.
    """

    def __init__(self, tower: str, tokens: int, **arguments: Any) -> None:
        super().__init__()
        self.tower, self.tokens = tower, tokens
        self.block = TransformerLayer(**arguments)

    def forward(self, state: Towers, batch: Batch) -> Towers:
        """Apply the layer to its tower."""
        mask = batch.mask if self.tower == "text" else Mask()
        return {**state, self.tower: self.block(state[self.tower], mask)}


class CLIPHead(Described):
    """The class token and the text's last token, normed, projected to a common space and compared."""

    def __init__(self, vision_width: int, width: int, embed_dim: int, end_token: int | None, epsilon: float) -> None:
        super().__init__()
        self.end_token = end_token
        self.picture_norm, self.text_norm = LayerNorm(vision_width, epsilon), LayerNorm(width, epsilon)
        self.picture = Linear(vision_width, embed_dim, bias=False, init=Normal(vision_width**-0.5))
        self.text = Linear(width, embed_dim, bias=False, init=Normal(width**-0.5))
        self.scale = nn.Parameter(torch.empty(()))
        self.initial: dict[str, Initial] = {"scale": Constant(math.log(1 / 0.07))}
        self.fill_alone()

    def forward(self, state: Towers, batch: Batch) -> dict[str, Tensor]:
        """Return `picture` (N, embed_dim) and `text` (M, embed_dim) of length 1, and `scores` (N, M), their scaled cosines."""
        ids = batch.input_ids
        ends = (ids if self.end_token is None else (ids == self.end_token).int()).argmax(-1)
        last = state["text"][torch.arange(len(ids), device=ids.device), ends]
        picture = functional.normalize(self.picture(self.picture_norm(state["picture"][:, 0])), dim=-1)  # type: ignore[arg-type]
        text = functional.normalize(self.text(self.text_norm(last)), dim=-1)  # type: ignore[arg-type]
        return {"picture": picture, "text": text, "scores": self.scale.exp() * picture @ text.t()}


@register_model("clip")
class CLIP(ChainModel):
    """CLIP for encoding and comparing pictures and texts (Radford et al., 2021); its training is not built.

    A batch holds N pictures in `extra["pixels"]` (N, in_chans, img_size, img_size) and M texts in `input_ids` (M, T).

    Args:
        embed_dim: width of the common space.
        img_size, patch_size: side lengths in pixels; patches tile the picture.
        in_chans: colours.
        vision_width, vision_layers, vision_heads, vision_ffn: sizes of the pictures' tower; vision_ffn None = 4 × vision_width.
        context_length: longest text in tokens.
        vocab_size: words; None = the tokenizer's.
        transformer_width, transformer_layers, transformer_heads, transformer_ffn: sizes of the texts' tower, likewise.
        end_token: the token whose first place stands for a text; None = the highest number in it, as OpenAI's release has it.
        attention_dropout_prob: dropout on attention probabilities.
        layernorm_epsilon: added to the variance in the norms.
        initializer_range: standard deviation of the initial weights, but of the projections.
        activation: of the feed-forward parts.
    """

    shares_positions = False  # a text's last token may lie anywhere
    objectives: dict[str, str] = {"loss": "pairs"}  # noqa: RUF012 - as in ChainModel

    @configurable
    def __init__(
        self,
        embed_dim: int = 512,
        img_size: int = 224,
        patch_size: int = 32,
        in_chans: int = 3,
        vision_width: int = 768,
        vision_layers: int = 12,
        vision_heads: int = 12,
        vision_ffn: int | None = None,
        context_length: int = 77,
        vocab_size: int | None = None,
        transformer_width: int = 512,
        transformer_layers: int = 12,
        transformer_heads: int = 8,
        transformer_ffn: int | None = None,
        end_token: int | None = None,
        attention_dropout_prob: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        activation: str = "quick_gelu",
    ) -> None:
        super().__init__()
        if vocab_size is None:
            raise ConfigError("model.cfg.vocab_size is not set and there is no tokenizer to take it from")
        init = Normal(initializer_range)
        self.vocab_size, self.max_seq_length = vocab_size, context_length
        self.embedding = CLIPEmbedding(
            img_size, patch_size, in_chans, vision_width, vocab_size, context_length, transformer_width, layernorm_epsilon, init
        )

        def tower(name: str, tokens: int, layers: int, width: int, heads: int, inner: int | None) -> nn.ModuleList:
            return nn.ModuleList(
                TowerUnit(
                    name, tokens, hidden_size=width, ffn_hidden_size=inner or 4 * width, num_attention_heads=heads,
                    attention_dropout_prob=attention_dropout_prob, layernorm_epsilon=layernorm_epsilon, activation=activation,
                    init=init, output_init=Normal(initializer_range / math.sqrt(2 * layers)),
                )
                for _ in range(layers)
            )  # fmt: skip

        self.picture = tower("picture", self.embedding.patch.num_patches + 1, vision_layers, vision_width, vision_heads, vision_ffn)
        self.text = tower("text", context_length, transformer_layers, transformer_width, transformer_heads, transformer_ffn)
        self.head = CLIPHead(vision_width, transformer_width, embed_dim, end_token, layernorm_epsilon)
        self.finish()

    @staticmethod
    def picture_tokens(cfg: Mapping[str, Any]) -> int:
        """Refuse training.

        Raises:
            NotBuiltError: always.
        """
        raise NotBuiltError(_NO_TRAINING)

    def units(self) -> dict[str, nn.Module]:
        """Return embedding, the layers of both towers, and head by name."""
        towers = {f"{name}.{i}": unit for name in ("picture", "text") for i, unit in enumerate(getattr(self, name))}
        return {"embedding": self.embedding, **towers, "head": self.head}

    def counts(self, batch: Batch) -> dict[str, int]:
        """Refuse training.

        Raises:
            NotBuiltError: always.
        """
        raise NotBuiltError(_NO_TRAINING)

    def prepare(self, batch: Batch) -> Batch:
        """See ChainModel.

        Raises:
            NotBuiltError: the batch has labels. LayoutError: more tokens than context_length.
        """
        if batch.labels is not None or any(name.endswith("labels") for name in batch.extra):
            raise NotBuiltError(_NO_TRAINING)
        length = batch.input_ids.shape[1]
        if length > self.max_seq_length:
            raise LayoutError(f"{length} tokens do not fit into context_length={self.max_seq_length}; cut the text")
        return super().prepare(batch)


__all__ = ["CLIP"]
