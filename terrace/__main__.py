"""The command `terrace`, and `python -m terrace`, which is what torchrun starts: `torchrun ... -m terrace train`."""

import sys
from importlib import import_module


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        # Importing takes a moment, in which Ctrl-C shall print one line, too.
        code: int = import_module("terrace.cli.main").main()
    except KeyboardInterrupt:
        print("terrace: interrupted", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
