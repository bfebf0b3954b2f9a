"""One part in a process of its own: `python -m bench.gpu_parts NAME --rows FILE ...`, as `bench/gpu.py` starts it.

Rows go to the file as they are found, one JSON list a line, so that those before a crash are kept; a last line says
that the part has ended.
"""

import argparse
import ctypes
import json
import signal
import sys
from importlib import import_module
from pathlib import Path

from bench.gpu_parts.running import END
from bench.gpu_parts.setting import Setting

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    """Run the part; 0 also where a row fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--peak-tflops", type=float, required=True)
    options = parser.parse_args()
    if sys.platform.startswith("linux"):
        # Nobody else would end it, were the parent killed: it is in a session of its own.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    setting = Setting(
        device=options.device, tiny=options.tiny, peak_tflops=options.peak_tflops, folder=options.folder.absolute()
    )
    module, _, argument = options.part.partition(":")
    rows = import_module(f"bench.gpu_parts.{module}").rows
    with options.rows.open("a", encoding="utf-8") as file:
        for row in rows(setting, argument) if argument else rows(setting):
            print(json.dumps(row), file=file, flush=True)
        print(json.dumps(END), file=file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
