"""RoBERTa: BERT without sentence pairs, whose position table begins after the row of padding."""

from __future__ import annotations

from torch import Tensor

from dufu.config.registry import register_model
from dufu.layers.initial import Normal
from dufu.models.bert.heads import ClassifierHead
from dufu.models.bert.model import Bert, BertClassifier, BertFeatures
from dufu.models.chain import Batch

OFFSET = 2  # the padding word's number, 1, and one more: as the published tables have it


def real_positions(batch: Batch) -> Tensor | None:
    """Return the positions (B, T) of the real tokens, counted from 0 whatever is padded before them; None where none is padded."""
    if batch.positions is not None or batch.padding is None or batch.held is not None:
        return batch.positions
    return (batch.padding.long().cumsum(1) - 1).clamp(min=0)


class _Positions:
    position_offset = OFFSET

    def prepare(self, batch: Batch) -> Batch:
        """See ChainModel; padding has no position."""
        batch.positions = real_positions(batch)
        prepared: Batch = super().prepare(batch)  # type: ignore[misc]
        return prepared


@register_model("roberta")
class Roberta(_Positions, Bert):
    """RoBERTa for pre-training by masked words. The arguments are those of Bert; `sizes.py` holds the published ones."""


@register_model("roberta_classifier")
class RobertaClassifier(_Positions, BertClassifier):
    """RoBERTa with a classifier, or with one label a regression, on the first token; the arguments are those of BertClassifier."""

    def make_head(
        self, hidden_size: int, num_labels: int, epsilon: float, dropout: float, pre_norm: bool, init: Normal
    ) -> ClassifierHead:
        """Return the head, which has dropout before its pooler too."""
        return ClassifierHead(hidden_size, num_labels, epsilon, dropout, pre_norm, init, dropout_first=True)


@register_model("roberta_features")
class RobertaFeatures(_Positions, BertFeatures):
    """RoBERTa without a head; the arguments are those of BertFeatures."""
