"""One part in a process of its own: `python -m bench.gpu_parts NAME --rows FILE ...`, as `bench/gpu.py` starts it.

Rows go to the file as they are found, one JSON list a line, so that those before a crash are kept.
"""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

from bench.gpu_parts.setting import Setting


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
    setting = Setting(
        device=options.device, tiny=options.tiny, peak_tflops=options.peak_tflops, folder=options.folder.absolute()
    )
    module, _, argument = options.part.partition(":")
    rows = import_module(f"bench.gpu_parts.{module}").rows
    with options.rows.open("a", encoding="utf-8") as file:
        for row in rows(setting, argument) if argument else rows(setting):
            print(json.dumps(row), file=file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
