"""The program that `terrace rehearse check` runs as every rank: times experiments with torch and gloo.

    python -m terrace.rehearse.probe EXPERIMENTS.json RESULT.json

The first file holds tables of `Experiment`; the second gets, from rank 0, the seconds of each: of the
slowest sender, or of the slowest rank of an all-reduce. The only module of this room that imports torch.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from terrace.base.files import write_atomic


def main(experiments: Path, result: Path) -> None:
    """Run all experiments as one rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seconds = []
    for experiment in json.loads(experiments.read_text(encoding="utf-8")):
        taken_s = _reduce(experiment, rank) if experiment["groups"] else _send(experiment, rank)
        slowest = torch.tensor([taken_s], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.append(float(slowest))
    if rank == 0:
        write_atomic(result, json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _send(experiment: dict[str, Any], rank: int) -> float:
    """Send along this rank's route and wait for an answer of one number; the first time is not counted."""
    number, small = torch.zeros(1), torch.zeros(1)
    message = torch.zeros(experiment["num_bytes"] // 4)
    to, sources = dict(experiment["routes"]).get(rank), [a for a, b in experiment["routes"] if b == rank]
    taken_s = 0.0
    for tensor, num_times in ((small, 1), (message, experiment["num_times"])):
        dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(num_times):
            if to is not None:
                dist.send(tensor, to)
                dist.recv(number, to)
            for source in sources:
                dist.recv(tensor, source)
                dist.send(number, source)
        taken_s = time.perf_counter() - begin_s
    return taken_s if to is not None else 0.0


def _reduce(experiment: dict[str, Any], rank: int) -> float:
    """All-reduce in this rank's group, once to warm up and once that counts."""
    mine = None
    for ranks in experiment["groups"]:
        group = dist.new_group(ranks)
        mine = group if rank in ranks else mine
    message = torch.zeros(experiment["num_bytes"] // 4)
    taken_s = 0.0
    for tensor in (torch.zeros(1), message):
        dist.barrier()
        begin_s = time.perf_counter()
        dist.all_reduce(tensor, group=mine)
        taken_s = time.perf_counter() - begin_s
    return taken_s


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
