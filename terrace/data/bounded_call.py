"""Calls a package function that may not return.

The regular expressions of a tokenizer.json are untrusted, and those of `tokenizers` backtrack: a line of a hundred
characters can take centuries. The package releases the interpreter lock while it works, so the call runs in a thread
that can be abandoned and ends with the process. When the package gives up, it panics; the panic report on the standard
error descriptor is dropped, since the error already says it in one line.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from terrace.base.errors import DataError

T = TypeVar("T")
_STDERR = 2
_lock = threading.Lock()  # of the descriptor


def within(limit_s: float, work: Callable[[], T], words: str) -> T:
    """Runs `work` with a time limit and returns its result or raises its error; an error that is no `Exception` is a
    panic.

    Raises `DataError` with `words` if it takes longer than `limit_s`.
    """
    found: list[T] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            found.append(work())
        except BaseException as error:  # raised again below
            raised.append(error)

    # A daemon, since the end of the process must not wait for it.
    thread = threading.Thread(target=call, name="terrace bounded call", daemon=True)
    with _set_apart() as drop:
        thread.start()
        thread.join(limit_s)
        if raised and is_panic(raised[0]):
            drop()
    if raised:
        raise raised[0]
    if not found:
        raise DataError(f"{words} takes more than {limit_s:.0f} s")
    return found[0]


def is_panic(error: BaseException) -> bool:
    """Whether an error is a Rust panic, whose class no module exports."""
    return type(error).__name__ == "PanicException"


@contextmanager
def _set_apart() -> Iterator[Callable[[], None]]:
    # What is written to standard error meanwhile, by other threads too, comes after the block, unless it is dropped.
    if not hasattr(os, "memfd_create"):
        yield lambda: None
        return
    with _lock:
        kept, apart = os.dup(_STDERR), os.memfd_create("stderr")
        os.dup2(apart, _STDERR)
        try:
            yield lambda: os.ftruncate(apart, 0)
        finally:
            os.dup2(kept, _STDERR)
            said = os.pread(apart, os.fstat(apart).st_size, 0)
            if said:
                os.write(_STDERR, said)
            os.close(apart)
            os.close(kept)
