"""Everything that is to be found out on a machine with a CUDA device, in one command of at most nine minutes.

    exactness   a tiny fp64 decoder under several plans, on the device against the CPU; and the engine against itself
                with the device idle before every instruction: a buffer reused or read too early shows
    training    a Llama-style stack of about 1 B parameters in bf16 by each contestant: the engine, plain PyTorch,
                both compiled, FSDP2, the engine with liger-kernel; step time, share of the peak (MFU), memory; then
                layers of an 8 B model
    prediction  `terrace probe`, then `terrace train` on its cluster file, compiled and not: step and memory predicted
                beside measured
    codecs      block codecs: the reference bit for bit, and bandwidth against a copy
    generation  tokens a second of the rollout engine, its tokens against those of the CPU
    fp8         scaled products beside bf16 ones; steps with products in fp8
    attention   torch's kernels by head size and length, forward and backward
    tests       the tests marked `gpu`
    products    bf16 products in a burst, for 20 s, and while copies run
    bandwidth   copies on the device, from and to pinned host memory
    fused       on two devices: tensor messages whole, in parts and fused with products; the same numbers, and steps

Each part is a process of its own with a time limit, so a crash or a hang costs that part alone. Rows are printed and
written to `--out` as they come: `results.jsonl`, a line a row, and `summary.md`, a table with the goals, which is
replaced whole. A row is ok, WRONG, "missed" (a goal), "skipped" (something it needs is not here) or "not run" (no time
was left). Exit code: 1 with a row that is WRONG or missed, else 3 with parts that were not run, else 0. The last line
has the command that runs those; it adds its rows to the same files. On a machine without a device the command says so
and exits 0; `--device cpu --tiny` tries the parts themselves there.

MFU counts three times the matrix products of a forward pass, attention by its causal half, and nothing for
recomputation.
"""

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from bench.gpu_parts.running import Part, run_parts
from bench.gpu_parts.setting import NOT_RUN, SECONDS
from bench.gpu_parts.summary import Summary

# In order of worth: the time may end before the parts do. The limits of the first seven fill nine minutes; parts take
# about half of their limits, so others follow.
PARTS = (
    Part("exactness:parity", 35),
    Part("exactness:streams", 45),
    Part("training:engine compiled", 95),
    Part("training:plain compiled", 80),
    Part("prediction:probe", 120),
    Part("prediction:compiled", 115),
    Part("codecs", 45),
    Part("training:8B engine compiled", 90),
    Part("training:8B plain compiled", 80),
    Part("generation", 60),
    Part("fp8", 120),
    Part("attention", 75),
    Part("tests", 150),
    Part("training:engine", 60),
    Part("training:engine liger", 75),
    Part("prediction:plain", 90),
    Part("products", 60),
    Part("training:fsdp2 compiled", 80),
    Part("training:plain", 45),
    Part("training:8B fsdp2 compiled", 75),
    Part("bandwidth", 30),
    Part("fused", 90),
)
NEEDED = ("torch", "numpy", "safetensors", "rich", "tomli_w")  # modules without which parts cannot begin


# Dense bf16 TFLOP/s of data sheets, by words of the device's name.
PEAKS = {"H100 PCIe": 756.0, "H100": 989.4, "H200": 989.4, "A100": 312.0, "B200": 2250.0, "GB200": 2500.0}
_ASK_S = 90.0
_PATIENCE = 4  # times the limits of parts, at sizes that are for trying them on any machine


def device_name() -> str | None:
    """Name of the first CUDA device, or None; raises `SystemExit` where the driver does not answer.

    A process of its own asks, so that this one needs nothing of a device and outlives all that happens to it.
    """
    words = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", words], capture_output=True, text=True, timeout=_ASK_S, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"no device answers: {getattr(error, 'stderr', '') or error}") from error
    return asked.stdout.strip() or None


def peak_tflops(name: str) -> float | None:
    """Dense bf16 TFLOP/s of a device by its name, the longest that fits."""
    fitting = [known for known in PEAKS if set(known.split()) <= set(name.replace("-", " ").split())]
    return PEAKS[max(fitting, key=len)] if fitting else None


def missing(names: Sequence[str] = NEEDED) -> str:
    """A line on packages that must be installed first; "" for none."""
    absent = [name.replace("_", "-") for name in names if find_spec(name) is None]
    if not absent:
        return ""
    line = f"not installed: {', '.join(absent)}; pip install {' '.join(absent)}"
    return f"{line} (without a network: docs/cuda.md, A machine without a network)"


def chosen(words: str | None) -> list[Part]:
    """Parts by words with commas: those that are called so, or else begin so; all where none are given."""
    names = {part.name for part in PARTS}
    wanted = words.split(",") if words is not None else [""]
    return [
        part
        for part in PARTS
        if any(part.name == word or (word not in names and part.name.startswith(word)) for word in wanted)
    ]


def main() -> int:
    """Print and keep rows as they come; the exit codes are those of the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False  # the last line repeats options by their names
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--minutes", type=float, default=9.0, help="of all parts together")
    parser.add_argument("--only", help="parts, with commas, by their names or the beginnings of names")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16; default: the data sheet of a known device")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, which try the parts and measure nothing")
    options = parser.parse_args()
    if line := missing():
        parser.error(line)
    end_s = time.monotonic() + 60 * options.minutes
    name = device_name() if options.device == "cuda" else "CPU"
    if name is None:
        print("no CUDA device here: nothing was run (--device cpu --tiny tries the parts)")
        return 0
    patience = _PATIENCE if options.tiny else 1
    parts = [Part(part.name, patience * part.limit_s) for part in chosen(options.only)]
    if not parts:
        parser.error(f"--only {options.only}: no part begins so; parts are {', '.join(part.name for part in PARTS)}")
    peak = options.peak_tflops or (peak_tflops(name) if options.device == "cuda" else 1.0)
    if peak is None:
        parser.error(f"{name} is not in {', '.join(PEAKS)}: give --peak-tflops of its data sheet, dense bf16")
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.only:
        (options.out / SECONDS).unlink(missing_ok=True)  # of other code, perhaps
    title = f"{name}, torch {version('torch')}"
    print(f"{title}\n", flush=True)
    # A launcher that ends this process gives it time to end the part that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def command(part: str, file: Path) -> list[str]:
        words = [sys.executable, "-m", "bench.gpu_parts", part, "--rows", str(file.absolute())]
        words += ["--folder", str(options.out.absolute()), "--device", options.device]
        return [*words, "--peak-tflops", f"{peak:g}", *(["--tiny"] if options.tiny else [])]

    summary = Summary(options.out, title, [part.name for part in parts], goes_on=bool(options.only))
    for part, row in run_parts(parts, command, options.out, end_s):
        summary.add(part, row)
        goal = f"  (goal {row.goal})" if row.goal else ""
        print(f"{part}  {row.subject}  {row.found}{goal}  {row.verdict}", flush=True)
    print(f"\n{summary.last_line()}")
    if left := summary.parts_with(NOT_RUN):
        print(f"for these: {again(left, sys.argv[1:])}")
    if summary.parts_with("WRONG") or summary.parts_with("missed"):
        return 1
    return 3 if left else 0


def again(parts: Sequence[str], given: Sequence[str]) -> str:
    """The command that runs these parts, with the other options that were given."""
    kept, words = list[str](), list(given)
    while words:
        word = words.pop(0)
        if word == "--only":
            words.pop(0)
        elif not word.startswith("--only="):
            kept.append(word)
    return shlex.join(["python", "-m", "bench.gpu", "--only", ",".join(parts), *kept])


if __name__ == "__main__":
    sys.exit(main())
