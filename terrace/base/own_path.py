"""Where Python looks for modules: never in the working folder, which may be a stranger's model.

Python puts it first for `python -m terrace`, for `python -c`, which starts the fork server, and for an empty part of
PYTHONPATH, as `:$PYTHONPATH` has where the variable is not set. A file `queue.py` in that folder would be run in place
of Python's own.

The working folder stays where Terrace itself lies in it, which is then a checkout, and where PYTHONPATH names it.
This module is imported before all others, so it imports what Python has loaded anyway.
"""

import os
import sys

_SAFE_PATH = "PYTHONSAFEPATH"  # tells a Python that starts to leave the working folder out
_OURS = "terrace"  # any value does


def leave_working_folder() -> None:
    """Take the working folder out of `sys.path`."""
    here = _working_folder()
    if here is None or is_trusted(here):
        return
    sys.path[:] = [each for each in sys.path if os.path.realpath(each or here) != here]


def safe_flags() -> tuple[str, ...]:
    """Options of Python for a child that is started with `-m` or `-c`."""
    here = _working_folder()
    return () if here is None or is_trusted(here) else ("-P",)


def safe_environment() -> dict[str, str]:
    """The same for a child whose command is not ours, as variables."""
    return {_SAFE_PATH: _OURS} if safe_flags() else {}


def free_children() -> None:
    """In such a child: programs that the user's code starts find their own modules."""
    if os.environ.get(_SAFE_PATH) == _OURS:
        del os.environ[_SAFE_PATH]


def is_trusted(here: str) -> bool:
    """Whether modules of the folder `here` may be imported as it is the working folder."""
    own = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
    named = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return here in (own, *map(os.path.realpath, named))


def _working_folder() -> str | None:
    try:
        return os.path.realpath(os.getcwd())
    except OSError:  # removed meanwhile: nothing can be imported from it
        return None
