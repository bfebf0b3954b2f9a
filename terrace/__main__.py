"""The command `terrace`, and `python -m terrace`, which torchrun starts: `torchrun ... -m terrace train`."""

import os
import sys

from terrace.base.own_path import leave_working_folder

leave_working_folder()  # before anything else is imported

from importlib import import_module  # noqa: E402


def main() -> int:
    """Run the command line; returns the exit code."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for words
        line, cursor = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
        import_module("terrace.cli.completion").complete(line[:cursor])
    try:
        # Importing takes a moment, in which Ctrl-C shall print one line, too.
        code: int = import_module("terrace.cli.main").main()
    except BaseException as error:
        if not _is_interrupt(error):
            raise
        print("terrace: interrupted", file=sys.stderr)
        return 130
    return code


def _is_interrupt(error: BaseException | None) -> bool:
    # Code that is interrupted may turn that into an error of its own, as Python does in the body of a class.
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


if __name__ == "__main__":
    sys.exit(main())
