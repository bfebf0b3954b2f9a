"""The program of `terrace rehearse check`, run as every rank: times experiments with torch and gloo.

    python -m terrace.lab.rehearse.probe EXPERIMENTS.json RESULT.json

The first file holds tables of `Experiment`; rank 0 writes the seconds of each to the second, from the first rank's
start to the last rank's end. The only module of this package that imports torch.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from terrace.base.files import write_atomic

_LEAD_S = 0.1  # enough for the start time to reach all ranks


def main(experiments: Path, result: Path) -> None:
    dist.init_process_group("gloo")
    seconds = []
    for experiment in json.loads(experiments.read_text(encoding="utf-8")):
        begin_s, end_s = _reduce(experiment) if experiment["groups"] else _send(experiment)
        span = torch.tensor([-begin_s, end_s], dtype=torch.float64)
        dist.all_reduce(span, op=dist.ReduceOp.MAX)  # first begin, last end: one clock for all, as on one machine
        seconds.append(float(span.sum()))
    if dist.get_rank() == 0:
        write_atomic(result, json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _send(experiment: dict[str, Any]) -> tuple[float, float]:
    # Messages along this rank's route, each answered by one number; the first, small one warms up.
    rank, number, small = dist.get_rank(), torch.zeros(1), torch.zeros(1)
    message = torch.zeros(experiment["num_bytes"] // 4)
    to, sources = dict(experiment["routes"]).get(rank), [a for a, b in experiment["routes"] if b == rank]
    begin_s = end_s = 0.0
    for tensor, num_times in ((small, 1), (message, experiment["num_times"])):
        begin_s = _together()
        for _ in range(num_times):
            if to is not None:
                dist.send(tensor, to)
                dist.recv(number, to)
            for source in sources:
                dist.recv(tensor, source)
                dist.send(number, source)
        end_s = time.monotonic()
    return (begin_s, end_s) if to is not None else (math.inf, -math.inf)


def _reduce(experiment: dict[str, Any]) -> tuple[float, float]:
    # Once to warm up, once timed.
    mine = None
    for ranks in experiment["groups"]:
        group = dist.new_group(ranks)
        mine = group if dist.get_rank() in ranks else mine
    begin_s = end_s = 0.0
    for tensor in (torch.zeros(1), torch.zeros(experiment["num_bytes"] // 4)):
        begin_s = _together()
        dist.all_reduce(tensor, group=mine)
        end_s = time.monotonic()
    return begin_s, end_s


def _together() -> float:
    # A barrier releases ranks at different times, so rank 0 broadcasts a common start time.
    dist.barrier()
    start = torch.tensor([time.monotonic() + _LEAD_S], dtype=torch.float64)
    dist.broadcast(start, 0)
    time.sleep(max(float(start) - time.monotonic(), 0))
    return time.monotonic()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
