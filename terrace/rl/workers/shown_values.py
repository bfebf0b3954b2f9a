"""What users' functions are given and return, in one line of an error message."""

import reprlib
from typing import Any

import numpy as np
from torch import Tensor

_SHOWN = 60  # characters of a prompt in an error message


def shown_prompt(text: str) -> str:
    """A prompt, shortened for an error message."""
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def shown_value(value: Any) -> str:
    """A short, one-line repr for an error message, even if the value's own __repr__ raises."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        return f"an array of shape {tuple(value.shape)}"
    try:
        return " ".join(reprlib.repr(value).split())
    except (Exception, SystemExit):  # its own __repr__ raises
        return f"a {type(value).__name__}"
