"""Eight gloo ranks on one machine: the engine against torch's FSDP2 (`fully_shard`) at the same placement.

    zero3   every block sharded over all ranks          fully_shard over a mesh of 8
    hsdp    sharded inside a node of 4, replicated      fully_shard over a mesh of 2 x 4
            across 2 nodes

Both live in the same processes and take turns, with a barrier before every step. A step takes as long as its slowest
rank. FSDP2 frees parameters after the forward, reduces after each backward (over the nodes only in the last
micro-batch) and is given the number of tokens; its loss is averaged outside the timed part. The third contestant is
FSDP2 with its reduce-scatter replaced by an all-to-all and a local sum, because gloo's own sends twice the bytes: the
remaining difference is not due to that.

Target: the engine is at least as fast as unmodified FSDP2.
"""

import multiprocessing
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from bench.common import (
    Batch,
    Step,
    Timing,
    alternate,
    bench_parser,
    decoder,
    engine_of,
    engine_step,
    free_port,
    local_cluster,
    loss_difference,
    micro_batches,
    print_table,
    ratio,
    ratio_words,
    real_blocks,
    torch_adamw,
    torch_trainer,
)
from bench.lab.fsdp import ReduceScatter
from terrace.model.config import num_params
from terrace.model.decoder import token_loss
from terrace.plan.presets import preset
from terrace.runtime.engine import Engine

TARGET = 1.0
PLACEMENTS = ("zero3", "hsdp")
HEADER = ["placement", "micros", "rounds", "FSDP2 ms", "FSDP2 a2a ms", "engine ms"]
HEADER += ["engine / FSDP2 (quartiles)", "engine / a2a", "loss diff"]


@dataclass(frozen=True)
class Job:
    """Settings given to every process."""

    world: int
    per_node: int
    hidden: int
    layers: int
    batch: int
    sequence: int
    rounds: int
    micros: Sequence[int]
    placements: Sequence[str]

    def batches(self, step: int, rank: int, num_micros: int) -> list[Batch]:
        """A rank's micro-batches of a step."""
        vocab = decoder(self.hidden, self.layers).vocab_size
        return micro_batches(step, rank, num_micros, (self.batch, self.sequence), vocab)


def all_to_all_reduce(output: Tensor, given: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """Reduce `given` into `output` by an all-to-all and a local sum; blocks."""
    incoming = torch.empty_like(given)
    dist.all_to_all_single(incoming, given, group=group)
    torch.sum(incoming.view(group.size(), -1), 0, out=output.view(-1))
    if op == dist.ReduceOp.AVG:
        output.div_(group.size())


def fsdp_step(job: Job, rank: int, placement: str, num_micros: int, all_to_all: bool) -> Step:
    """One step of a training loop on FSDP2."""
    config = decoder(job.hidden, job.layers)
    num_nodes = job.world // job.per_node
    if placement == "hsdp":
        mesh = init_device_mesh("cpu", (num_nodes, job.per_node), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (job.world,), mesh_dim_names=("shard",))
    model: Any = nn.Sequential(*real_blocks(config))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
        if all_to_all:
            block.set_custom_reduce_scatter(ReduceScatter(all_to_all_reduce))
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    parameters = list(model.parameters())
    num_tokens = num_micros * job.batch * (job.sequence - 1)  # of one rank; FSDP2 averages over ranks

    def loss_of(tokens: Tensor, labels: Tensor, is_last: bool) -> Tensor:
        model.set_requires_all_reduce(is_last)
        return token_loss(model(tokens), labels) / num_tokens

    train = torch_trainer(parameters, torch_adamw(parameters), loss_of)
    return lambda number: train(job.batches(number, rank, num_micros))[0]


def engine_for(job: Job, rank: int, placement: str, num_micros: int) -> Engine:
    """The engine at this placement."""
    if placement == "zero3":
        cluster = local_cluster({"node": job.world})  # one level, as the mesh of FSDP2
    else:
        cluster = local_cluster({"node": job.per_node, "system": job.world // job.per_node})
    blocks = real_blocks(decoder(job.hidden, job.layers))
    return engine_of(blocks, cluster, preset(placement, cluster), num_micros, rank=rank)


def contest(job: Job, rank: int, placement: str, num_micros: int) -> dict[str, Timing]:
    """Time all contestants; wall times are the slowest rank's, losses are global."""
    engine = engine_for(job, rank, placement, num_micros)
    steps: dict[str, Step] = {
        "FSDP2": fsdp_step(job, rank, placement, num_micros, all_to_all=False),
        "a2a": fsdp_step(job, rank, placement, num_micros, all_to_all=True),
        "engine": engine_step(engine, lambda number: job.batches(number, rank, num_micros)),
    }
    timings = alternate(steps, job.rounds, warmup=3, before=dist.barrier)
    engine.drain()
    engine.close()
    for timing in timings.values():
        wall, losses = torch.tensor(timing.wall_s), torch.tensor(timing.losses, dtype=torch.float64)
        dist.all_reduce(wall, dist.ReduceOp.MAX)
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        timing.wall_s, timing.losses = wall.tolist(), losses.tolist()
    return timings


def row(placement: str, num_micros: int, timings: Mapping[str, Timing]) -> list[str]:
    fsdp, other, engine = timings["FSDP2"], timings["a2a"], timings["engine"]
    return [
        placement,
        str(num_micros),
        str(len(fsdp.wall_s)),
        *(f"{statistics.median(timing.wall_s) * 1e3:.0f}" for timing in (fsdp, other, engine)),
        ratio_words(engine.wall_s, fsdp.wall_s),
        f"{ratio(engine.wall_s, other.wall_s):.3f}",
        f"{loss_difference(fsdp, engine):.0e}",
    ]


def work(rank: int, job: Job, port: int, found: Any) -> None:
    """One process. Rank 0 prints and leaves the worst ratio in `found`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=job.world)
    rows = []
    for placement in job.placements:
        for num_micros in job.micros:
            timings = contest(job, rank, placement, num_micros)
            rows.append(row(placement, num_micros, timings))
            if rank == 0:
                found.value = max(found.value, ratio(timings["engine"].wall_s, timings["FSDP2"].wall_s))
    if rank == 0:
        print_table(HEADER, rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Print the table; return 1 when --check is given and the target is missed."""
    parser = bench_parser(__doc__, world=8, per_node=4, hidden=192, layers=6, batch=2, sequence=64, rounds=20)
    parser.add_argument("--micros", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    options = vars(parser.parse_args())
    is_checked, job = options.pop("check"), Job(**options)
    size = num_params(decoder(job.hidden, job.layers)) / 1e6
    print(f"{size:.2f} M parameters, {job.batch} x {job.sequence} tokens a rank, {job.world} gloo ranks, fp32\n")
    found = multiprocessing.get_context("spawn").Value("d", 0.0)
    spawn(work, (job, free_port(), found), nprocs=job.world)  # type: ignore[no-untyped-call]
    print(f"\nworst ratio {found.value:.3f}, target {TARGET}: {'met' if found.value <= TARGET else 'MISSED'}")
    return 1 if is_checked and found.value > TARGET else 0


if __name__ == "__main__":
    sys.exit(main())
