"""`python -m terrace`, which is also what torchrun starts: `torchrun ... -m terrace train`."""

import sys

from terrace.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
