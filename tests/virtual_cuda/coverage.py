"""Which of the lines that only a GPU reaches the tests of this folder execute: `python -m tests.virtual_cuda.coverage`.

Arguments are pytest's: by default the tests of every day; `-m ""` has those of the night, too. Prints the lines left.
"""

import os
import subprocess
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.virtual_cuda.gpu_lines import FOLDER, executed


def main(arguments: list[str]) -> int:
    """Run the tests and print lines by file. Returns pytest's exit code."""
    options = arguments or ["-m", "not nightly"]
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent), *options]
        code = subprocess.run(command, env=os.environ | {FOLDER: folder}, check=False).returncode
        done, left = executed(Path(folder))
    print(f"\n{len(done)} of {len(done) + len(left)} lines executed, {100 * len(done) / (len(done) + len(left)):.1f} %")
    numbers = Counter(line.file for line in done)
    for file, lines in groupby(left, lambda line: line.file):
        some = list(lines)
        print(f"terrace/{file}: {len(some)} of {len(some) + numbers[file]} left")
        for function, of_function in groupby(some, lambda line: line.function):
            print(f"    {function}: {', '.join(str(line.first) for line in of_function)}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
