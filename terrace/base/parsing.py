"""Parsers for untrusted JSON and TOML, in time linear in the size of the text.

Python's parsers raise `RecursionError` for deeply nested brackets, and tomllib needs quadratic time and memory in the
number of parts of a dotted key. Both raise `ValueError` here, as any other syntax error. Python refuses to convert
integers with thousands of digits; JSON has no such limit, so they are read as infinity, as `json` reads 1e999.
"""

import json
import re
import tomllib
from collections.abc import Callable
from typing import Any

_MOST_PARTS = 32  # of a dotted key; the deepest of Terrace's own has six
# Strings and comments of TOML. A multi-line string may end with five quotes, of which two are content. Quantifiers are
# possessive (`*+`) and an unterminated string takes the rest of the text, so that the search is linear.
_OPAQUE = re.compile(
    r'"""(?:\\.|[^\\"]|"(?!""))*+(?:"{3,5})?|"(?:\\[^\n]|[^"\\\n])*+"?'
    r"|'''(?:[^']|'(?!''))*+(?:'{3,5})?|'[^'\n]*+'?|#[^\n]*+",
    re.DOTALL,
)
_DOTTED = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}")


def parse_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse a JSON text. `pairs` is the `object_pairs_hook` of `json.loads`. Raises `ValueError`."""
    try:
        try:
            return json.loads(text, object_pairs_hook=pairs)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError:
            # Only as a second attempt: a Python function called for every number is slow.
            return json.loads(text, object_pairs_hook=pairs, parse_int=whole_number)
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply") from error


def whole_number(digits: str) -> int | float:
    """Convert digits to an integer, or to infinity if there are more than Python converts."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text. Raises `ValueError`."""
    # Strings are replaced by a name, so that a quoted part of a key still counts as a part.
    if _DOTTED.search(_OPAQUE.sub(lambda found: "" if found[0].startswith("#") else "x", text)):
        raise ValueError(f"a key has more than {_MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply") from error
