"""The blend of several sources: a steady rate for each, exactly, and any position at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import DataError
from terrace.data.mixture import MAX_PERIOD, Blend, parts_of


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(0, 3000))
def test_every_prefix_is_less_than_a_sample_off(weights: list[int], start: int) -> None:
    blend, total = Blend(weights), sum(weights)
    count = 3 * total + 7
    sources, indices = blend.place(np.arange(count))
    for source, weight in enumerate(weights):
        given_so_far = np.cumsum(sources == source)
        # In integers: |given - n * weight / total| < 1 for every n.
        assert (np.abs(given_so_far * total - np.arange(1, count + 1) * weight) < total).all()
        assert indices[sources == source].tolist() == list(range(int(given_so_far[-1])))
        assert blend.counts(count)[source] == given_so_far[-1]
    far, far_indices = blend.place(np.arange(start, start + 5))
    walked = blend.place(np.arange(start + 5))
    assert (far.tolist(), far_indices.tolist()) == (walked[0][start:].tolist(), walked[1][start:].tolist())


def test_weights_count_as_the_decimals_that_are_written() -> None:
    assert parts_of([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert parts_of([3, 1.5]) == (2, 1)
    assert parts_of([1e-3, 1]) == (1, 1000)
    assert parts_of([5]) == (1,)


def test_a_period_costs_the_same_anywhere() -> None:
    blend = Blend([0.6, 0.3, 0.1])
    far = 10**15
    sources, indices = blend.place(np.arange(far, far + 10))
    assert sorted(sources.tolist()) == [0] * 6 + [1] * 3 + [2]
    assert indices[sources == 2].tolist() == [far // 10]
    assert blend.counts(far) == [6 * 10**14, 3 * 10**14, 10**14]


def test_the_blend_is_pinned() -> None:
    """A run that resumes under a newer version must see the same sources: this list may never change."""
    assert Blend([5, 3, 2]).place(np.arange(12))[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1]


def test_weights_that_cannot_be() -> None:
    for weight in (0, -1, float("nan"), float("inf")):
        with pytest.raises(DataError, match="must be a positive number"):
            parts_of([1, weight])
    with pytest.raises(DataError, match=rf"at most {MAX_PERIOD} are kept: write them .* as 0\.333, 0\.667$"):
        parts_of([0.333333333, 0.666666667])
