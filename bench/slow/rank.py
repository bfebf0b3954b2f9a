"""One rank of one contestant: steps in spans from barrier to barrier; rank 0 prints a line of JSON.

A span of a contestant with local steps is a whole cycle with nothing under way at its ends. So it pays for one exchange
of everything, less the part hidden behind steps, and no barrier but those at its ends crosses the slow link.
"""

import argparse
import gc
import importlib
import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from bench.common import real_blocks
from bench.lab import counters
from bench.lab.contest import Contestant, Setting, Text, model_of
from bench.lab.job import Job
from bench.lab.launch import MARK, Place, place
from bench.slow.contestants import JOB, Entry, contestant
from terrace.comm.exchange import gather_plain
from terrace.model.blocks import num_params

_TIMEOUT = timedelta(minutes=10)


def run(entry: Entry, job: Job, at: Place, num_spans: int) -> dict[str, object]:
    """The record of a contestant, the same on every rank but for rounding."""
    module = importlib.import_module(f"bench.slow.{entry.module}")
    blocks, text = real_blocks(model_of(job)), Text(job)
    setting = Setting(job=job, blocks=blocks, num_micros=1, micro_batch=1, rank=at.rank)
    made: Contestant = module.make(setting, **entry.options)
    losses: list[float] = []

    def steps(number: int) -> None:
        for _ in range(number):
            losses.append(made.step(text.batches(at.rank, len(losses), 1, 1)).loss)

    steps(entry.warmup)
    gc.collect()
    gc.disable()  # a collection could fall into a span
    dist.barrier()
    sent, cpu_s, spans_s = counters.sent_bytes(len(job.tiers)), time.process_time(), []
    for _ in range(num_spans):
        begin_s = time.perf_counter()
        steps(entry.span)
        dist.barrier()
        spans_s.append(time.perf_counter() - begin_s)
    cpu_s, after, timed = time.process_time() - cpu_s, counters.sent_bytes(len(job.tiers)), num_spans * entry.span
    gc.enable()
    made.finish()
    own = {
        "steps_s": [span_s / entry.span for span_s in spans_s],
        "cpu_s": cpu_s / timed,
        "losses": losses,
        "sent": None if sent is None or after is None else [(b - a) / timed for a, b in zip(sent, after, strict=True)],
    }
    everyone = gather_plain(own, torch.device("cpu"))
    counted = all(each["sent"] is not None for each in everyone)
    columns = list(zip(*(each["sent"] for each in everyone), strict=True)) if counted else []
    record = {
        "contestant": entry.name,
        "num_params": num_params(model_of(job)),
        "steps_s": [max(times) for times in zip(*(each["steps_s"] for each in everyone), strict=True)],
        "cpu_s": sum(each["cpu_s"] for each in everyone),
        "losses": [sum(each) / len(each) for each in zip(*(one["losses"] for one in everyone), strict=True)],
        "sent_bytes": dict(zip(job.tiers, map(sum, columns), strict=True)) if counted else None,
        "expected_bytes": {tier: at.world_size * size for tier, size in made.expected_bytes.items()} or None,
    }
    made.close()
    return record


def main() -> int:
    """Run one contestant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestant")
    parser.add_argument("--spans", type=int, required=True, help="timed spans")
    options = parser.parse_args()
    at = place()
    if at.world_size != JOB.world_size:
        sys.exit(f"the job has {JOB.world_size} ranks, but {at.world_size} were started")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    record = run(contestant(options.contestant), JOB, at, options.spans)
    if at.rank == 0:
        print(MARK + json.dumps(record), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
