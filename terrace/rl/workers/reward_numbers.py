"""Numbers that a reward function gives: of Python, of numpy, of torch, one by one or as an array of the batch."""

import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor


def given_numbers(found: Any) -> Iterator[Any]:
    """The numbers of a reward's result, one by one; raises `TypeError` for a result that is no series of numbers."""
    if isinstance(found, (str, bytes, Mapping, AbstractSet)) or not isinstance(found, Iterable) or _is_one(found):
        raise TypeError(f"it gave {shown_value(found)}, which is no list: give a number for each response, in order")
    yield from found


def in_fp32(given: Any) -> float:
    """The number as it will be kept; NaN where it is none, infinite beyond fp32."""
    try:
        if isinstance(given, (Tensor, np.ndarray)):
            # The value below a mask is none.
            if not _is_one(given) or given is np.ma.masked:
                return math.nan
            given = given.item()
        # A bool of numpy is no number to Python.
        if isinstance(given, complex) or not isinstance(given, (Number, np.bool_)):
            return math.nan
        return float(torch.tensor(float(given), dtype=torch.float32))  # type: ignore[arg-type]
    except OverflowError:  # an int beyond fp64
        return math.inf
    except Exception:  # its own __float__ raises, or it is a tensor without values, as on the device "meta"
        return math.nan


def _is_one(value: Any) -> bool:
    """Whether it is an array without dims."""
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0


def shown_value(value: Any) -> str:
    """A value in an error, on one line and short, whatever its own words do."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        return f"an array of shape {tuple(value.shape)}"
    try:
        return " ".join(reprlib.repr(value).split())
    except (Exception, SystemExit):  # its own __repr__ raises
        return f"a {type(value).__name__}"


def shown_error(error: BaseException) -> str:
    """The type of an error and the first line of its message, whatever its own words do."""
    try:
        lines = str(error).strip().splitlines()
    except (Exception, SystemExit):  # its own __str__ raises
        lines = []
    if isinstance(error, SystemExit):
        return f"called sys.exit({lines[0] if lines else ''})"
    return f"raised {type(error).__name__}{f': {lines[0][:200]}' if lines else ''}"
