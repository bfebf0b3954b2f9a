"""The key of a run in a results file: a digest of all that decides it, so that no record of other settings is taken."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass


def key_of(*parts: object) -> str:
    """Twelve hexadecimal digits, equal for equal parts: dataclasses, mappings, sequences, strings and numbers.

    Raises `TypeError` for other values, whose words may say too little.
    """
    return hashlib.sha256(json.dumps(parts, default=_plain, sort_keys=True).encode()).hexdigest()[:12]


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} has no place in the key of a run: give its fields")
