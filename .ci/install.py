"""`pip install` with short progress: one line for each large download, and the seconds in between.

    python .ci/install.py WORDS...

WORDS go to pip. If it fails, its last lines are shown; install.log in the environment's folder has all of its output.
"""

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

QUIET_S = 20.0  # seconds without a line of pip's after which the elapsed time is printed
_LAST = 30  # lines of pip's that are shown if it fails
_DOWNLOAD = re.compile(
    r"\s*(?:Downloading|Using cached) (?:\S*/)?([\w.]+-[\w.!+]+?)(?:-[\w.-]+)?\.(?:whl|tar\.gz) \((.*[MG]B)\)"
)


def shown(line: str) -> str:
    """The words to print for a line of pip's output; "" for a line that a user can do without."""
    if found := _DOWNLOAD.match(line):
        return f"  {found[1].replace('-', ' ')}, {found[2]}"
    head, _, packages = line.partition(": ")
    if head == "Installing collected packages":
        return f"  installing {len(packages.split(', '))} packages"
    if line.startswith(("ERROR", "error:", "WARNING: Retrying")):
        return f"  {line}"
    return ""


def install(command: Sequence[str], log: Path, say: Callable[[str], None], quiet_s: float = QUIET_S) -> int:
    """Run `command` to its end, write its output to `log`, and return its exit code."""
    began_s, lines = time.monotonic(), list[str]()
    say(f"installing into {log.parent}; the first time this takes minutes and up to 2 GB of downloads")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in _lines(process.stdout.fileno(), quiet_s):
            if line is None:
                say(f"  ... {time.monotonic() - began_s:.0f} s")
                continue
            lines.append(line)
            if words := shown(line):
                say(words)
    log.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if process.returncode:
        say("\n".join(lines[-_LAST:]))
        say(f"installing failed after {time.monotonic() - began_s:.0f} s; {log} has all of the output")
    else:
        say(f"installed in {time.monotonic() - began_s:.0f} s")
    return process.returncode


def _lines(pipe: int, quiet_s: float) -> Iterator[str | None]:
    """Lines of a pipe until its end; None after every `quiet_s` seconds without one."""
    left = b""
    while True:
        if not select.select([pipe], [], [], quiet_s)[0]:
            yield None
            continue
        read = os.read(pipe, 1 << 16)
        *whole, left = (left + read).split(b"\n")
        yield from (line.decode(errors="replace").rstrip() for line in whole)
        if not read:
            if left:
                yield left.decode(errors="replace").rstrip()
            return


if __name__ == "__main__":
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    log_file = Path(sys.prefix) / "install.log"
    sys.exit(install([*pip, *sys.argv[1:]], log_file, lambda line: print(line, flush=True)))
