"""`terrace explain`: the former name of `terrace simulate --view program`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from terrace.cli import simulate
from terrace.cli.options import OVERRIDES_HELP


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="the same as terrace simulate --view program",
        description="The former name of terrace simulate --view program, with all of its options.",
        epilog=OVERRIDES_HELP,
    )
    simulate.add_view_options(parser, "program")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print the new name once, and run it."""
    code = simulate.run(options, rest)
    print("terrace: explain is now terrace simulate --view program", file=sys.stderr)
    return code
