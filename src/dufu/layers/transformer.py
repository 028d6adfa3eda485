"""One transformer layer: attention and feed-forward with residuals, dropout, and the norms before or after."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from dufu.errors import ConfigError
from dufu.layers.attention import Attention, KeyValueCache
from dufu.layers.dropout import Dropout, DropPath
from dufu.layers.initial import Initial
from dufu.layers.mask import Mask
from dufu.layers.mlp import MLP, GatedMLP
from dufu.layers.norm import LayerNorm
from dufu.layers.rotary import Rotation
from dufu.layers.router import Routing


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (pre-norm); with `post_norm`, norm(x + attention(x)), norm(x + mlp(x)).

    Args:
        hidden_size, ffn_hidden_size, num_attention_heads: sizes.
        attention_dropout_prob: on the attention probabilities.
        output_dropout_prob: on each branch before it is added.
        drop_path_prob: probability of dropping a whole branch of a sample, each branch by itself.
        layernorm_epsilon: added to the variance, or mean square, in the norms.
        activation: of the plain feed-forward part.
        post_norm: the order of the original transformer and of BERT.
        is_decoder: adds cross attention to `memory`.
        init, output_init: how the input and output projections begin.
        num_key_value_heads, head_size, bias: of attention.
        norm: makes a norm from a width and an epsilon, such as RMSNorm.
        mlp: the feed-forward part, such as a GatedMLP or a MixtureOfExperts; None = MLP(hidden_size, ffn_hidden_size, activation).
        scale: factor on the attention scores; None = 1/√head_size.
        output_bias, head_norm, window: of self-attention; `output_bias` also of cross attention.
        branch_norm: whether each branch has a second norm, of what it adds (in pre-norm order; GLM-4-0414).

    Shapes: (B, T, hidden_size) → the same.

    Raises:
        ConfigError: branch_norm together with post_norm or is_decoder.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        attention_dropout_prob: float = 0.0,
        output_dropout_prob: float = 0.0,
        drop_path_prob: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        activation: str | None = "gelu",
        post_norm: bool = False,
        is_decoder: bool = False,
        init: Initial | None = None,
        output_init: Initial | None = None,
        num_key_value_heads: int | None = None,
        head_size: int | None = None,
        bias: bool = True,
        norm: Callable[[int, float], nn.Module] = LayerNorm,
        mlp: nn.Module | None = None,
        scale: float | None = None,
        output_bias: bool | None = None,
        head_norm: Callable[[int], nn.Module] | None = None,
        window: int | None = None,
        branch_norm: bool = False,
    ) -> None:
        super().__init__()
        if branch_norm and (post_norm or is_decoder):
            raise ConfigError("TransformerLayer: branch_norm is of a pre-norm layer without cross attention")
        self.post_norm, self.is_decoder = post_norm, is_decoder

        def attention(cross: bool) -> Attention:
            return Attention(
                hidden_size,
                num_attention_heads,
                num_key_value_heads,
                head_size,
                is_cross_attention=cross,
                attention_dropout_prob=attention_dropout_prob,
                bias=bias,
                init=init,
                output_init=output_init,
                scale=scale,
                output_bias=output_bias,
                head_norm=None if cross else head_norm,
                window=None if cross else window,
            )

        self.attention_norm = norm(hidden_size, layernorm_epsilon)
        self.attention = attention(False)
        self.attention_dropout = Dropout(output_dropout_prob)
        self.attention_drop_path = DropPath(drop_path_prob)
        if is_decoder:
            self.cross_norm = norm(hidden_size, layernorm_epsilon)
            self.cross_attention = attention(True)
            self.cross_dropout = Dropout(output_dropout_prob)
            self.cross_drop_path = DropPath(drop_path_prob)
        self.mlp_norm = norm(hidden_size, layernorm_epsilon)
        self.mlp = MLP(hidden_size, ffn_hidden_size, activation, init=init, output_init=output_init) if mlp is None else mlp
        self.mlp_dropout = Dropout(output_dropout_prob)
        self.mlp_drop_path = DropPath(drop_path_prob)
        self.attention_branch_norm = norm(hidden_size, layernorm_epsilon) if branch_norm else None
        self.mlp_branch_norm = norm(hidden_size, layernorm_epsilon) if branch_norm else None

    def forward(
        self,
        hidden: Tensor,
        mask: Mask | Tensor | None = None,
        keys: Tensor | None = None,
        cache: KeyValueCache | None = None,
        memory: Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        memory_cache: KeyValueCache | None = None,
        bias: Tensor | None = None,
        rotation: Rotation | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Apply the layer.

        Args:
            hidden: (B, T, hidden_size).
            mask, cache, bias, rotation: of self-attention; see Attention.
            keys: (B, T) dropout keys of the tokens.
            memory, memory_mask, memory_cache: of cross attention, in a decoder.
            routing: passed to the feed-forward part, where that is a MixtureOfExperts.
        """
        # The first token of a whole sample decides whether a branch is dropped, wherever it is held.
        samples = mask.held.keys if isinstance(mask, Mask) and mask.held is not None else keys
        branch = hidden if self.post_norm else self.attention_norm(hidden)
        branch = self.attention(branch, mask, keys, cache=cache, bias=bias, rotation=rotation)
        if self.attention_branch_norm is not None:
            branch = self.attention_branch_norm(branch)
        hidden = hidden + self.attention_drop_path(self.attention_dropout(branch, keys), samples)
        if self.post_norm:
            hidden = self.attention_norm(hidden)
        if self.is_decoder:
            branch = hidden if self.post_norm else self.cross_norm(hidden)
            branch = self.cross_attention(branch, memory_mask, keys, memory, memory_cache)
            hidden = hidden + self.cross_drop_path(self.cross_dropout(branch, keys), samples)
            if self.post_norm:
                hidden = self.cross_norm(hidden)
        elif memory is not None:
            raise ConfigError("memory was given to a layer without cross attention; build TransformerLayer(..., is_decoder=True)")
        branch = hidden if self.post_norm else self.mlp_norm(hidden)
        if routing is not None:
            branch = self.mlp(branch, routing)
        else:
            branch = self.mlp(branch, keys) if isinstance(self.mlp, (MLP, GatedMLP)) else self.mlp(branch)
        if self.mlp_branch_norm is not None:
            branch = self.mlp_branch_norm(branch)
        hidden = hidden + self.mlp_drop_path(self.mlp_dropout(branch, keys), samples)
        return self.mlp_norm(hidden) if self.post_norm else hidden
