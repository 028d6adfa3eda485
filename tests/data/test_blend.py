"""Several datasets as one: the shares, and every sample equally often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dufu.data.blend import Concatenated, Weighted
from dufu.errors import ConfigError


class Named:
    """A dataset whose samples say what they are."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.fingerprint = f"{name}{size}"

    def __len__(self) -> int:
        return self.size

    def item(self, index: int, epoch: int) -> Any:
        assert 0 <= index < self.size
        return self.name, index, epoch


def parts(*sizes: int) -> list[Named]:
    return [Named("abcdef"[i], size) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [((10, 10), (0.7, 0.3)), ((100, 7, 31), (1, 2, 3)), ((2, 2), (0.99, 0.01)), ((5, 5, 5, 5), (0.1, 0.1, 0.1, 0.7)), ((3,), (1,))],
)
def test_any_stretch_has_the_shares(sizes: tuple[int, ...], weights: tuple[float, ...]) -> None:
    """n places in a row hold n × share of each dataset, up to less than one for each dataset in the list."""
    blend = Weighted(parts(*sizes), weights)
    names = [blend.place(number)[0] for number in range(1500)]
    for start in (0, 1, 17, 600):
        for stop in (start + 1, start + 10, start + 137, 1500):
            count = Counter(names[start:stop])
            for part, weight in enumerate(weights):
                assert abs(count[part] - (stop - start) * weight / sum(weights)) < len(weights)


def test_over_the_epochs_each_sample_comes_equally_often_and_each_dataset_keeps_its_own_epochs() -> None:
    blend = Weighted(parts(10, 7, 4), (5, 3, 2))
    seen = [blend.item(index, epoch) for epoch in range(40) for index in range(len(blend))]
    for part in blend.parts:
        own = [(index, epoch) for name, index, epoch in seen if name == part.name]
        assert own == [(i % part.size, i // part.size) for i in range(len(own))]
        counts = Counter(index for index, _ in own)
        assert max(counts.values()) - min(counts.values()) <= 1


def test_an_epoch_is_as_long_as_the_scarcest_dataset_lasts() -> None:
    assert len(Weighted(parts(10, 10), (0.5, 0.5))) == 20
    assert len(Weighted(parts(90, 10), (0.5, 0.5))) == 20
    assert len(Weighted(parts(10, 10), (1, 3))) == 13


def test_a_blend_of_very_many_samples_is_a_formula() -> None:
    """Nothing is kept for each sample: 10^12 of them are ready at once."""
    blend = Weighted(parts(10**12, 10**12), (0.25, 0.75))
    name, index, _ = blend.item(10**12, 0)
    assert name in "ab" and 0 <= index < 10**12


def test_concatenated_is_each_sample_once_with_its_epoch() -> None:
    joined = Concatenated(parts(3, 1, 2))
    assert len(joined) == 6
    assert [joined.item(i, 5) for i in range(6)] == [("a", 0, 5), ("a", 1, 5), ("a", 2, 5), ("b", 0, 5), ("c", 0, 5), ("c", 1, 5)]
    assert joined[3] == ("b", 0, 0)


@pytest.mark.parametrize("weights", [(1,), (1, 0), (1, -1), (1, float("nan")), (1, float("inf")), (1, 1, 1)])
def test_weights_that_describe_nothing(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="one positive number for each of the 2 data files"):
        Weighted(parts(2, 2), weights)


def test_the_fingerprint_follows_parts_and_weights() -> None:
    found = {
        Weighted(parts(2, 3), (1, 1)).fingerprint,
        Weighted(parts(2, 3), (1, 2)).fingerprint,
        Weighted(parts(3, 2), (1, 1)).fingerprint,
        Concatenated(parts(2, 3)).fingerprint,
        Concatenated(parts(3, 2)).fingerprint,
    }
    assert len(found) == 5
    assert Weighted(parts(2, 3), (1, 1)).fingerprint == Weighted(parts(2, 3), (np.float64(2), 2)).fingerprint
