"""Calls into a package that may not come back.

The patterns of a tokenizer.json are regular expressions of a stranger, and those of `tokenizers` go back and try again:
a line of a hundred characters can take centuries. The package holds no lock of the interpreter while it works, so the
call runs in a thread that can be left behind; it ends with the process.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from terrace.base.errors import DataError

T = TypeVar("T")


def within(limit_s: float, work: Callable[[], T], words: str) -> T:
    """The result of `work`, or its error; raises `DataError` with `words` if it takes longer than `limit_s`."""
    found: list[T] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            found.append(work())
        except BaseException as error:  # handed on below, whatever it is
            raised.append(error)

    # A daemon, since the end of the process must not wait for it.
    thread = threading.Thread(target=call, name="terrace bounded call", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not found:
        raise DataError(f"{words} takes more than {limit_s:.0f} s")
    return found[0]
