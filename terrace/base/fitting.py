"""Typed values from JSON files of a run folder, which may be damaged or from another version.

Values are checked against the types of fields; nothing is coerced, unknown keys are ignored. The strict schema
(`terrace.base.schema`) explains each error, but takes a hundred times as long, too long for the many lines of a run.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from terrace.base.parsing import parse_json
from terrace.base.sealed import KEY, is_intact_json

T = TypeVar("T")

# Sums, ratios and charts of numbers up to here stay finite; no figure of a run comes near.
_LARGEST = 1e100

MaybeNaN = Annotated[float, "NaN and infinities fit, too"]


def parse_table(text: str) -> dict[str, Any]:
    """Parse a JSON object and remove its checksum.

    Raises `ValueError` for any other text, or if the checksum differs.
    """
    if not is_intact_json(text):
        raise ValueError("its checksum differs")
    table = parse_json(text)
    if not isinstance(table, dict):
        raise ValueError("not a table")
    table.pop(KEY, None)
    return table


def fitting(cls: type[T], table: Mapping[str, Any], *, skip: bool = False) -> T:
    """Build the dataclass `cls` from `table`.

    Raises `ValueError` if a required value is missing or a value has the wrong type; with `skip`, the latter counts as
    missing.
    """
    values = {}
    for key, fits in _checks(cls).items():  # type: ignore[arg-type]  # a type has a hash
        if key not in table:
            continue
        if fits(table[key]):
            values[key] = table[key]
        elif not skip:
            raise ValueError(f"{key} = {table[key]!r:.80} does not fit")
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(str(error)) from error


def numbers(table: object) -> dict[str, float]:
    """The finite numbers in `table`; empty if it is not a dict."""
    return {key: value for key, value in table.items() if _is_finite(value)} if isinstance(table, dict) else {}


@cache
def _checks(cls: type) -> dict[str, Callable[[object], bool]]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: _check(hints[field.name]) for field in fields(cls)}


def _check(hint: Any) -> Callable[[object], bool]:
    if hint is Any:
        return lambda value: True
    if hint is float:
        return _is_finite
    if hint is int:
        return lambda value: type(value) is int and _is_finite(value)
    if hint == MaybeNaN:
        return lambda value: _is_finite(value) or (isinstance(value, float) and not math.isfinite(value))
    if get_origin(hint) in (dict, list):
        origin, inner = get_origin(hint), _check(get_args(hint)[-1])
        # Keys of JSON are always text.
        return lambda value: isinstance(value, origin) and all(map(inner, _items(value)))
    if get_args(hint):
        choices = [_check(each) for each in get_args(hint)]
        return lambda value: any(fits(value) for fits in choices)
    if hint not in (str, bool, NoneType):
        raise TypeError(f"no values of type {hint} are read from damaged files")
    return lambda value: type(value) is hint


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def _is_finite(value: object) -> bool:
    # NaN compares false; a bool is an int in Python.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST
