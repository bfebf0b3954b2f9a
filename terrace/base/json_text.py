"""JSON that others wrote, read with whole numbers of any length."""

import json
from collections.abc import Callable
from typing import Any


def read_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text, its objects made by `pairs` if given.

    Raises `ValueError` for text that is not JSON, and `RecursionError` for deep nesting.

    Python refuses to convert whole numbers of thousands of digits; JSON has no such limit. They are read as infinite,
    as `json` reads 1e999.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        # Only now, since a function of Python called for every number takes time.
        return json.loads(text, object_pairs_hook=pairs, parse_int=whole_number)


def whole_number(digits: str) -> int | float:
    """The number that `digits` spell, infinite where Python does not convert so many."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)
