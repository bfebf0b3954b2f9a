"""Everything that is to be found out on a machine with a CUDA device, in one command of at most nine minutes.

    exactness   a tiny fp64 decoder under several plans, on the device against the CPU; and the engine against itself
                with the device idle before every instruction: a buffer reused or read too early shows
    bandwidth   copies on the device, from and to pinned host memory
    codecs      block codecs: the reference bit for bit, and bandwidth against a copy (target 70 %)
    training    a Llama-style stack of about 1 B parameters in bf16 by each contestant: the engine, plain PyTorch,
                both compiled, FSDP2; step time, share of the peak (MFU), memory; then layers of an 8 B model
    prediction  `terrace probe`, then `terrace train` on its cluster file: step and memory predicted beside measured
    attention   torch's kernels by head size and length, forward and backward
    products    bf16 products in a burst and for 30 s, fp8 products beside them
    generation  tokens a second of the rollout engine, its tokens against those of the CPU
    tests       the tests marked `gpu`

Each part is a process of its own with a time limit, so a crash or a hang costs that part alone. Rows are written to
`--out` as they come, and printed when their part ends; parts for which no time is left are named. On a machine without
a device it says so and exits 0; `--device cpu --tiny` tries the parts themselves there.

MFU counts three times the matrix products of a forward pass, attention as the full square, and nothing for
recomputation.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bench.gpu_parts.setting import Row

ROOT = Path(__file__).parents[1]
_LEAST_S = 5.0  # a part that has less is not started


class Part(NamedTuple):
    """A module of `bench/gpu_parts/`, with an argument after a colon, and the most seconds that it may take."""

    name: str
    limit_s: float


# In order of worth: the time may end before the parts do.
PARTS = (
    Part("exactness", 90),
    Part("training:engine", 60),
    Part("training:plain compiled", 75),
    Part("training:engine compiled", 75),
    Part("prediction", 120),
    Part("codecs", 60),
    Part("bandwidth", 30),
    Part("training:plain", 45),
    Part("training:fsdp2 compiled", 75),
    Part("products", 60),
    Part("attention", 40),
    Part("generation", 60),
    Part("training:8B engine compiled", 75),
    Part("training:8B plain compiled", 75),
    Part("tests", 90),
)


def run_parts(
    parts: Sequence[Part],
    command: Callable[[str, Path], Sequence[str]],
    out: Path,
    end_s: float,
) -> Iterator[tuple[str, Row]]:
    """Run one part after the other until `end_s` on the monotonic clock; yields (part, row) as each part ends.

    `command(part, file)` is a command that appends rows to the file, a JSON list a line. A part that fails or is late
    ends with a row that says so and names its log, a file beside the rows.
    """
    for part in parts:
        left_s = end_s - time.monotonic()
        if left_s < _LEAST_S:
            yield part.name, Row("not run", "no time was left", False)
            continue
        name = part.name.replace(":", "-").replace(" ", "-")
        file, log = out / f"{name}.jsonl", out / f"{name}.log"
        file.unlink(missing_ok=True)
        limit_s, problem = min(part.limit_s, left_s), ""
        with log.open("w", encoding="utf-8") as text:
            try:
                done = subprocess.run(
                    command(part.name, file), cwd=ROOT, stdout=text, stderr=text, timeout=limit_s, check=False
                )
                problem = f"ended with {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                problem = f"had not ended after {limit_s:.0f} s"
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            yield part.name, Row(*json.loads(line))
        if problem:
            last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing was printed"])[
                -1
            ]
            yield part.name, Row("failed", f"{problem}: {last[:200]} ({log.name})", False)


def main() -> int:
    """Print the rows of each part as it ends; return 1 when a check fails, 0 without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--minutes", type=float, default=9.0, help="of all parts together")
    parser.add_argument("--only", help="parts, with commas, by the beginnings of their names")
    parser.add_argument(
        "--peak-tflops", type=float, default=989.4, help="dense bf16; default: the data sheet of H100 and H200 SXM"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, which try the parts and measure nothing")
    options = parser.parse_args()
    end_s = time.monotonic() + 60 * options.minutes
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing was run (--device cpu --tiny tries the parts)")
        return 0
    wanted = tuple(options.only.split(",")) if options.only else ("",)
    parts = [part for part in PARTS if part.name.startswith(wanted)]
    if not parts:
        parser.error(f"--only {options.only}: no part begins so; parts are {', '.join(part.name for part in PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}\n", flush=True)

    def command(part: str, file: Path) -> list[str]:
        words = [sys.executable, "-m", "bench.gpu_parts", part, "--rows", str(file.absolute())]
        words += ["--folder", str(options.out.absolute()), "--device", options.device]
        return [*words, "--peak-tflops", f"{options.peak_tflops:g}", *(["--tiny"] if options.tiny else [])]

    found = []
    for part, row in run_parts(parts, command, options.out, end_s):
        found.append([part, row.subject, row.found, "ok" if row.passes else "WRONG"])
        print("  ".join(found[-1]), flush=True)
    (options.out / "rows.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    wrong = [part for part, _, _, verdict in found if verdict == "WRONG"]
    print(f"\n{len(found)} rows, {len(wrong)} wrong{': ' * bool(wrong)}{', '.join(dict.fromkeys(wrong))}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
