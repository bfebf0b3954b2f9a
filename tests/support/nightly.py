"""The rest of a grid of cases: `make test` leaves it out, `make test-all` runs it."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def nightly(*cases: Any) -> list[Any]:
    """These cases of a `parametrize` with the marker; a tuple has a value for each argument."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly) for case in cases]


def every(number: int, cases: Iterable[Any]) -> list[Any]:
    """These cases of a `parametrize`; one in `number` is run every day and the others nightly."""
    return [nightly(case)[0] if index % number else case for index, case in enumerate(cases)]


def in_turns(number: int, *axes: Iterable[Any]) -> list[Any]:
    """The grid of these axes; along each axis, one case in `number` is run every day and the others nightly."""
    return [
        pytest.param(
            *(value for _, value in case), marks=pytest.mark.nightly if sum(i for i, _ in case) % number else ()
        )
        for case in product(*map(enumerate, axes))
    ]
