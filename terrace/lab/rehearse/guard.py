"""Kills the ranks when the rehearsal itself is killed: a separate program that waits for its pipe to close.

Its input names process groups: `PID` adds one, `-PID` removes it. If the input ends without `done`, the rehearsal died
without ending its ranks, and the guard kills every group still named. Runs as a file, by any Python.
"""

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress


def groups_left(lines: Iterable[str]) -> set[int]:
    """Process groups to kill after the last line."""
    groups: set[int] = set()
    for line in lines:
        if line.strip() == "done":
            return set()
        with suppress(ValueError):  # the last line may be cut short by the death of its writer
            number = int(line)
            if number > 0:
                groups.add(number)
            else:
                groups.discard(-number)
    return groups


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the rehearsal, which ends us
    for group in groups_left(sys.stdin):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
