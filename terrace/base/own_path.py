"""Removes the working folder from Python's module search path, since it may be an untrusted model folder.

Python puts it first for `python -m terrace`, for `python -c`, which starts the fork server, and for an empty entry of
PYTHONPATH, as in `:$PYTHONPATH` where the variable is not set. A file `queue.py` in that folder would then shadow
Python's own module.

The working folder is kept if it is the checkout of Terrace or PYTHONPATH names it. This module is imported first, so it
imports only modules that Python has already loaded.
"""

import os
import sys

_SAFE_PATH = "PYTHONSAFEPATH"  # makes a new Python process omit the working folder
_OURS = "terrace"  # any value does


def leave_working_folder() -> None:
    """Remove the working folder from `sys.path`, unless it is trusted."""
    here = _working_folder()
    if here is None or is_trusted(here):
        return
    sys.path[:] = [each for each in sys.path if os.path.realpath(each or here) != here]


def safe_flags() -> tuple[str, ...]:
    """Python options for a child process that is started with `-m` or `-c`."""
    here = _working_folder()
    return () if here is None or is_trusted(here) else ("-P",)


def safe_environment() -> dict[str, str]:
    """`safe_flags` as environment variables, for a child process whose command line we do not build."""
    return {_SAFE_PATH: _OURS} if safe_flags() else {}


def free_children() -> None:
    """Undo `safe_environment` in that child, so that programs started by user code find their own modules."""
    if os.environ.get(_SAFE_PATH) == _OURS:
        del os.environ[_SAFE_PATH]


def is_trusted(here: str) -> bool:
    """Whether modules may be imported from `here` as the working folder."""
    own = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
    named = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return here in (own, *map(os.path.realpath, named))


def _working_folder() -> str | None:
    try:
        return os.path.realpath(os.getcwd())
    except OSError:  # removed meanwhile: nothing can be imported from it
        return None
