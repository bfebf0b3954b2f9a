"""One rank of one contestant: for each case make it, warm it up, time its steps; rank 0 prints a line of JSON.

A step ends with a barrier, where the next begins: work that a contestant leaves running after a step is paid for in the
next, and after the last step it is waited for inside the timed part. So the sum of the times hides nothing, and neither
do the counters, which are read at the same two ends.
"""

import argparse
import gc
import importlib
import json
import math
import sys
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.common import real_blocks
from bench.lab import counters
from bench.lab.contest import Contestant, Result, Setting, Text, model_of, new_adamw
from bench.lab.entries import Entry, Trial, contestant
from bench.lab.job import WARMUP_STEPS, Job
from bench.lab.launch import MARK, Place, place
from terrace.comm.exchange import gather_plain
from terrace.model.blocks import num_params

_TIMEOUT = timedelta(minutes=5)


def imported(entry: Entry, job: Job) -> Any:
    """The adapter's module, with everything imported that would count as memory of the model."""
    module = importlib.import_module(f"bench.lab.{entry.adapter}")
    if hasattr(module, "load"):
        module.load(job.ranks_per_node)
    new_adamw([nn.Parameter(torch.zeros(2, 2))])  # a process's first optimizer imports torch._dynamo
    return module


def run_case(
    entry: Entry, job: Job, at: Place, module: Any, accum: int, trial: Trial, steps: int, limit_s: float
) -> dict[str, Any]:
    """The record of one contestant at one accumulation; the same on every rank but for rounding.

    A case whose first step takes more than `limit_s` is dropped: that step is all of its record.
    """
    text, micro_batch = Text(job), trial.cut(accum)
    counters.trim()  # memory left by an earlier case would hide a part of this one's growth
    before = counters.resident_bytes()
    blocks = real_blocks(model_of(job))
    setting = Setting(job=job, blocks=blocks, num_micros=accum // micro_batch, micro_batch=micro_batch, rank=at.rank)
    made: Contestant = module.make(setting, **entry.arguments(trial))
    del blocks, setting
    results: list[Result] = []

    def one_step(is_last: bool = False) -> None:
        results.append(made.step(text.batches(at.rank, len(results), accum, micro_batch)))
        if is_last:
            made.finish()
        dist.barrier()

    dist.barrier()
    begin = time.perf_counter()
    for _ in range(WARMUP_STEPS):
        one_step(is_last=True)
    common = {"contestant": entry.name, "accum": accum, "trial": trial.name, "num_params": num_params(model_of(job))}
    warmup_s = slowest(time.perf_counter() - begin)
    if warmup_s > limit_s:
        made.close()
        return {**common, "dropped": True, "steps_s": [warmup_s]}
    gc.collect()
    gc.disable()  # a collection could fall into a timed step
    peak_is_own = counters.forget_peak()
    sent = counters.sent_bytes(len(job.tiers))
    dist.barrier()
    cpu = time.process_time()
    stamps = [time.perf_counter()]
    for number in range(steps):
        one_step(is_last=number == steps - 1)
        stamps.append(time.perf_counter())
    cpu_s = time.process_time() - cpu
    after = counters.sent_bytes(len(job.tiers))
    gc.enable()
    own = {
        "steps_s": [end - begin for begin, end in pairwise(stamps)],
        "cpu_s": cpu_s / steps,
        "losses": [result.loss for result in results],
        "grad_norms": [result.grad_norm for result in results],
        "sent": None if sent is None or after is None else [b - a for a, b in zip(sent, after, strict=True)],
        "peak_growth_bytes": counters.peak_resident_bytes() - before,
        "optimizer_bytes": sum(tensor.numel() * tensor.element_size() for tensor in made.states()),
        "time_s": [dict(result.time_s) for result in results[WARMUP_STEPS:]],
    }
    everyone = gather_plain(own, torch.device("cpu"))
    record = {
        **common,
        "dropped": False,
        "peak_is_own": peak_is_own,
        "expected_bytes": {tier: made.expected_bytes.get(tier, 0) * at.world_size for tier in job.tiers}
        if made.expected_bytes
        else None,
        **merged(everyone, job, steps),
    }
    made.close()
    return record


def slowest(seconds: float) -> float:
    """The longest of the ranks' times, the same on all of them."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def merged(everyone: list[dict[str, Any]], job: Job, steps: int) -> dict[str, Any]:
    """Measurements of all ranks as one: slowest times, mean losses, summed bytes, largest memory."""
    sent = None
    if all(own["sent"] is not None for own in everyone):
        totals = [sum(column) / steps for column in zip(*(own["sent"] for own in everyone), strict=True)]
        sent = dict(zip(job.tiers, totals, strict=True))
    categories = sorted({name for own in everyone for part in own["time_s"] for name in part})
    parts = [part for own in everyone for part in own["time_s"]]
    return {
        "steps_s": [max(times) for times in zip(*(own["steps_s"] for own in everyone), strict=True)],
        "losses": [sum(values) / len(values) for values in zip(*(own["losses"] for own in everyone), strict=True)],
        "cpu_s": sum(own["cpu_s"] for own in everyone),
        "grad_norms": everyone[0]["grad_norms"],
        "sent_bytes": sent,
        "peak_growth_bytes": max(own["peak_growth_bytes"] for own in everyone),
        "optimizer_bytes": max(own["optimizer_bytes"] for own in everyone),
        "time_s": {name: sum(part.get(name, 0.0) for part in parts) / len(parts) for name in categories},
    }


def main() -> int:
    """Run the cases of one contestant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestant")
    parser.add_argument("--cases", type=json.loads, required=True, help="pairs of accumulation and trial, as JSON")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--drop", type=float, default=0.0, help="part of the fastest case's step; 0 drops none")
    options = parser.parse_args()
    entry, job, at = contestant(options.contestant), Job(), place()
    if at.world_size != job.world_size:
        sys.exit(f"the lab has {job.world_size} ranks, but {at.world_size} were started")
    torch.set_num_threads(1)
    begin = time.perf_counter()
    module = imported(entry, job)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    best_s = math.inf
    for accum, name in options.cases:
        limit_s = options.drop * best_s if options.drop else math.inf
        record = run_case(entry, job, at, module, accum, entry.trial(name), options.steps, limit_s)
        record["wall_s"] = time.perf_counter() - begin
        begin, best_s = time.perf_counter(), min(best_s, *record["steps_s"])
        if at.rank == 0:
            print(MARK + json.dumps(record), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
