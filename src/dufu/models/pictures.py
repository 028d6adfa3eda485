"""What models of pictures share: the checks of a batch, and the class scores with their loss, labels mixed or not.

A picture's tokens are its patches: `input_ids` (B, T) only counts them, so that dropout keys and masks are as for text. Its values are
`extra["pixels"]` (B, colours, height, width), its class `extra["class_labels"]` (B,). Where two pictures were mixed (mixup, CutMix),
`extra["mixed_labels"]` (B,) is the other one's class and `extra["mixed_share"]` (B,) the share of the first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dufu.errors import ConfigError, DataError
from dufu.layers.loss import IGNORE
from dufu.models.chain import Batch, Sums

PIXELS, LABELS, MIXED_LABELS, MIXED_SHARE = "pixels", "class_labels", "mixed_labels", "mixed_share"
TOP = (1, 5)  # a picture is right where its class is among so many highest scores


def pixels_of(batch: Batch) -> Tensor:
    """Return the pictures (B, colours, height, width) of a batch.

    Raises:
        ConfigError: the samples have none.
    """
    if PIXELS not in batch.extra:
        raise ConfigError(
            'a batch without pixels for a model of pictures; set dataloader.dataset to one of pictures, such as "pictures"'
        )
    return batch.extra[PIXELS]


def check_tokens(batch: Batch, tokens: int, img_size: int, patch_size: int) -> None:
    """Raise DataError where a batch's samples have another number of tokens than the model makes of a picture."""
    found = batch.input_ids.shape[1]
    if found != tokens:
        raise DataError(
            f"samples of {found} tokens, but img_size={img_size} and patch_size={patch_size} make {tokens} of a picture; "
            f"set dataloader.dataset.tokens={tokens} or null"
        )


def count_pictures(batch: Batch) -> dict[str, int]:
    """Return how many pictures of a batch are scored."""
    labels = batch.extra.get(LABELS)
    return {"samples": 0 if labels is None else int((labels != IGNORE).sum())}


def check_classes(num_classes: int | None, label_smoothing: float, headless: bool = True) -> int:
    """Return the number of classes.

    Args:
        headless: whether 0, a model without a head, is possible.

    Raises:
        ConfigError: it is not known, or the smoothing is no share.
    """
    if num_classes is None:
        raise ConfigError("model.cfg.num_classes is not set and there are no data to take it from")
    if num_classes < (0 if headless else 1):
        raise ConfigError(f"model.cfg.num_classes={num_classes}: at least 1{', or 0 for a model without a head' * headless}")
    if not 0.0 <= label_smoothing < 1.0:
        raise ConfigError(f"model.cfg.label_smoothing={label_smoothing}: from 0 to below 1")
    return num_classes


def _losses(scores: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return functional.cross_entropy(scores, labels, reduction="none", ignore_index=IGNORE, label_smoothing=smoothing)


def score_classes(scores: Tensor, batch: Batch, label_smoothing: float = 0.0) -> Sums:
    """Return the summed loss, the counts, and how many pictures are right.

    Args:
        scores: (B, classes).
        batch: with class labels; see the module.
        label_smoothing: share of the target's probability spread evenly over the classes (Szegedy et al., 2016).

    Returns:
        `loss`, `samples`, `tokens`, and `samples_correct@k` for 1 and, of more than five classes, 5. Of a mixture the first label counts.
    """
    labels = batch.extra[LABELS]
    scored = labels != IGNORE
    logits = scores.float()
    losses = _losses(logits, labels, label_smoothing)
    if MIXED_LABELS in batch.extra:
        share = batch.extra[MIXED_SHARE]
        losses = share * losses + (1.0 - share) * _losses(logits, batch.extra[MIXED_LABELS], label_smoothing)
    sums: Sums = {"loss": losses.sum(), "samples": scored.sum(), "tokens": scored.sum() * batch.length}
    found = logits.detach()
    mine = found.gather(-1, labels.clamp(min=0).unsqueeze(-1))
    earlier = torch.arange(found.shape[-1], device=found.device) < labels.unsqueeze(-1)
    place = ((found > mine) | ((found == mine) & earlier)).sum(-1)  # of equal scores the smaller class comes first
    for k in TOP:
        if found.shape[-1] > k or k == 1:
            sums[f"samples_correct@{k}"] = ((place < k) & scored).sum()
    return sums


def stochastic_depth(rate: float, depth: int) -> list[float]:
    """Return each layer's probability of dropping a branch: from 0 in even steps to `rate` (Huang et al., 2016)."""
    return [rate * index / max(1, depth - 1) for index in range(depth)]
