"""Rules for plan tables of the form tier -> axis -> degree."""

from collections.abc import Collection, Mapping
from typing import Any

from terrace.base.errors import PlanError, did_you_mean
from terrace.plan.plan import AXES, FACTORS


def check_table(
    table: str, rows: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, int], axes: Collection[str]
) -> None:
    """Raise `PlanError` for a tier not in `sizes`, an axis not in `axes`, or an invalid degree."""
    for name, row in rows.items():
        if name not in sizes:
            raise PlanError(f"{table} names tier {name!r}, which is not in the cluster{did_you_mean(name, sizes)}")
        for axis, degree in row.items():
            if axis not in axes:
                hint = _axis_hint(name, axis) if axes is AXES else did_you_mean(axis, axes)
                raise PlanError(f"{table}.{name} names axis {axis!r}{hint}")
            _check_degree(f"{table}.{name}.{axis}", axis, degree)


def _axis_hint(tier: str, word: str) -> str:
    """Suggestion for `word`, written where a tier's mapping expects an axis."""
    for axis, factors in FACTORS.items():
        if word in factors:
            return f", which is a part of {axis}: write mapping.{tier}.{axis}.{word}"
    return did_you_mean(word, AXES)


def _check_degree(where: str, axis: str, degree: int | Mapping[str, int]) -> None:
    """Raise `PlanError` unless `degree`, found at key `where`, is valid for `axis`."""
    # Factored axes nest: each factor is checked like an axis of its own.
    if isinstance(degree, Mapping):
        if axis not in FACTORS:
            raise PlanError(
                f"{where} = {dict(degree)}: only the {' and the '.join(FACTORS)} axis are factored; give one number"
            )
        for factor, number in degree.items():
            if factor not in FACTORS[axis]:
                raise PlanError(f"{where} names {factor!r}{did_you_mean(factor, FACTORS[axis])}")
            _check_degree(f"{where}.{factor}", factor, number)
    elif degree < 1:
        raise PlanError(f"{where} = {degree}: a degree is at least 1")
