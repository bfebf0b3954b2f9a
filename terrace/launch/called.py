"""The name by which the user called the command line, for commands suggested in messages."""

import os
import shlex
import shutil
import sys

_NAME = "terrace"


def called() -> str:
    """`terrace`, or the path of the script if a shell would not find it under that name.

    Under `python -m terrace`, torchrun and in a user's own program it is `terrace`.
    """
    given = sys.argv[0] if sys.argv else ""
    if os.path.basename(given) != _NAME or not os.path.isfile(given):
        return _NAME
    found = shutil.which(_NAME)
    return _NAME if found is not None and os.path.samefile(found, given) else shlex.quote(given)
