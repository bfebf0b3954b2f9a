"""The name by which the user has called the command line, for commands that they are told to type next."""

import os
import shlex
import shutil
import sys

_NAME = "terrace"


def called() -> str:
    """`terrace`, or the path of the script where no shell would find that one under the name.

    Under `python -m terrace`, torchrun and in a program of the user it is `terrace`.
    """
    given = sys.argv[0] if sys.argv else ""
    if os.path.basename(given) != _NAME or not os.path.isfile(given):
        return _NAME
    found = shutil.which(_NAME)
    return _NAME if found is not None and os.path.samefile(found, given) else shlex.quote(given)
