"""ALBERT (Lan et al., "ALBERT: a lite BERT for self-supervised learning of language representations", 2019)."""

from dufu.models.albert.model import Albert
from dufu.models.albert.sizes import SIZES

__all__ = ["SIZES", "Albert"]
