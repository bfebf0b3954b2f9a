"""The rest of a grid of cases: `make test` leaves it out, `make test-all` runs it."""

from typing import Any

import pytest


def nightly(*cases: Any) -> list[Any]:
    """These cases of a `parametrize` with the marker; a tuple has a value for each argument."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly) for case in cases]
