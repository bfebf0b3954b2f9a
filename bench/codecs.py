"""Speed of the block codecs on one CPU thread.

GB/s of input: bytes of a message's elements over the processor time of an encode, a decode (into the same dtype), and
both. Target: both together at least 1 GB/s of bf16, for int8 and int4 in blocks of 128, and 0.2 GB/s for the largest
of 32. Elements are normal random numbers. Processor time is used because other jobs disturb it less; each figure is the
best of `--rounds`, as a slower one tells about the neighbours. The target of
`packed` is 0.5 GB/s, and it has no feedback. `feedback` is an encode with its residual, `add` the sum
of four messages into fp32, per message.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.claims import Claim, judge, measured, options_for_claims, print_table
from terrace.comm import codecs
from terrace.plan.wire import WireFormat, parse_format

GOALS = {"int8": 1.0, "int4": 1.0, "topk": 0.2, "packed": 0.5}  # of bf16, by format as written
_UNIT: dict[str, Any] = {"unit": "GB/s of elements", "at_least": True}
HEADER = ("format", "elements", "encode", "decode", "both", "feedback", "add", "target")
FORMATS = ["int8", "int4", "fp8", "int8:32", "int4:32", "topk", "topk:256", "packed"]
MESSAGES = 4  # summed by `add`


def best_s(work: Callable[[], None], rounds: int) -> float:
    """The least processor time of a call, in seconds."""
    work()
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times)


def measure(wire: WireFormat, dtype: torch.dtype, numel: int, rounds: int) -> tuple[list[str], float]:
    """A row of the table, without its target, and the bytes per second of encode and decode together."""
    values = torch.randn(1, numel, dtype=torch.float32).to(dtype)
    decoded, residual, total = torch.empty_like(values), torch.zeros(1, numel), torch.zeros(numel)
    messages = torch.empty(MESSAGES, wire.message_bytes(numel), dtype=torch.uint8)
    codecs.encode(values.expand(MESSAGES, -1), wire, messages)
    one = messages[:1]
    encode_s = best_s(lambda: codecs.encode(values, wire, one), rounds)
    decode_s = best_s(lambda: codecs.decode(one, wire, decoded), rounds)
    left = None if wire.packed else residual
    feedback_s = best_s(lambda: codecs.encode(values, wire, one, left), rounds)
    add_s = best_s(lambda: codecs.decode_add(messages, wire, total), rounds) / MESSAGES
    size_bytes = numel * values.element_size()
    both = size_bytes / (encode_s + decode_s)
    speeds = [size_bytes / seconds for seconds in (encode_s, decode_s, encode_s + decode_s, feedback_s)]
    speeds.append(numel * total.element_size() / add_s)
    return [wire.name, str(dtype).removeprefix("torch."), *(f"{speed / 1e9:.2f}" for speed in speeds)], both


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; with `--check` return 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 22, help="of a message; default 4 Mi: out of the cache")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--formats", nargs="+", default=FORMATS, metavar="FORMAT")
    options_for_claims(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {options.elements} elements, GB/s of elements, one thread\n")
    rows: list[list[str]] = []
    claims: list[Claim] = []
    for text in options.formats:
        wire = parse_format(text)
        for dtype in (torch.bfloat16, torch.float32):
            row, both = measure(wire, dtype, options.elements, options.rounds)
            goal = GOALS.get(text) if dtype == torch.bfloat16 else None
            if goal is not None:
                claims.append(measured(f"{text}: encode and decode of bf16 on one core", [both / 1e9], goal, **_UNIT))
            rows.append([*row, "" if goal is None else "met" if claims[-1].is_met else "MISSED"])
    print_table(HEADER, rows)
    return judge(claims, options)


if __name__ == "__main__":
    sys.exit(main())
