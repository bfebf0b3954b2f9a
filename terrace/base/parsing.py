"""JSON and TOML of strangers: the time to parse a text is bounded by a small multiple of its size.

Python's parsers raise `RecursionError` for brackets that are nested deeply, and tomllib takes the square of a dotted
key's parts in time and memory. Both are a `ValueError` here, as every other mistake of a text. Python refuses to
convert whole numbers of thousands of digits; JSON has no such limit, so they are read as infinite, as `json` reads
1e999.
"""

import json
import re
import tomllib
from collections.abc import Callable
from typing import Any

_MOST_PARTS = 32  # of a dotted key; the deepest of Terrace's own has six
# Strings and comments of TOML. A text of several lines may end with five quotes, of which two are its own. Nothing is
# tried twice (`*+`), and one that does not end takes the rest, so that the search is linear.
_OPAQUE = re.compile(
    r'"""(?:\\.|[^\\"]|"(?!""))*+(?:"{3,5})?|"(?:\\[^\n]|[^"\\\n])*+"?'
    r"|'''(?:[^']|'(?!''))*+(?:'{3,5})?|'[^'\n]*+'?|#[^\n]*+",
    re.DOTALL,
)
_DOTTED = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}")


def parse_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text; raises `ValueError`. `pairs` makes an object of its keys and values."""
    try:
        try:
            return json.loads(text, object_pairs_hook=pairs)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError:
            # Only now, since a function of Python called for every number takes time.
            return json.loads(text, object_pairs_hook=pairs, parse_int=whole_number)
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply") from error


def whole_number(digits: str) -> int | float:
    """The number that `digits` spell, infinite where Python does not convert so many."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text; raises `ValueError`."""
    # A name in place of a string keeps a quoted part of a key a part.
    if _DOTTED.search(_OPAQUE.sub(lambda found: "" if found[0].startswith("#") else "x", text)):
        raise ValueError(f"a key has more than {_MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply") from error
