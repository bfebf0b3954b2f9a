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

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from bench.common import (
    ADAMW,
    Step,
    Timing,
    alternate,
    block_names,
    decay_groups,
    decoder,
    free_port,
    local_cluster,
    loss_difference,
    micro_batches,
    print_table,
    ratio,
    real_blocks,
    spread,
)
from terrace.model.config import num_params
from terrace.model.decoder import token_loss
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch as MicroBatch
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
    micros: tuple[int, ...]
    placements: tuple[str, ...]


class AllToAllReduceScatter:
    """FSDP2's reduce-scatter as an all-to-all and a local sum."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer; FSDP2 asks for its inputs and outputs here."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor` into `output_tensor`; blocks, as FSDP2 does on a CPU anyway."""
        incoming = torch.empty_like(input_tensor)
        dist.all_to_all_single(incoming, input_tensor, group=group)
        torch.sum(incoming.view(group.size(), -1), 0, out=output_tensor.view(-1))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


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
            block.set_custom_reduce_scatter(AllToAllReduceScatter())
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        decay_groups(parameters), lr=ADAMW.lr, betas=(ADAMW.beta1, ADAMW.beta2), eps=ADAMW.eps, fused=True
    )
    num_tokens = num_micros * job.batch * (job.sequence - 1)  # of one rank; FSDP2 averages over ranks

    def step(number: int) -> float:
        batches = micro_batches(number, rank, num_micros, (job.batch, job.sequence), config.vocab_size)
        total = torch.zeros(())
        for micro, (tokens, labels) in enumerate(batches):
            model.set_requires_all_reduce(micro == num_micros - 1)
            loss = token_loss(model(tokens), labels) / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        nn.utils.clip_grad_norm_(parameters, ADAMW.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item()

    return step


def engine_for(job: Job, rank: int, placement: str, num_micros: int) -> Engine:
    """The engine at this placement."""
    blocks = real_blocks(decoder(job.hidden, job.layers))
    if placement == "zero3":
        cluster = local_cluster({"node": job.world})  # one level, as the mesh of FSDP2
    else:
        cluster = local_cluster({"node": job.per_node, "system": job.world // job.per_node})
    return Engine(
        blocks,
        names=block_names(blocks),
        cluster=cluster,
        plan=preset(placement, cluster),
        num_micros=num_micros,
        objective=token_loss,
        rank=rank,
        optimizer=ADAMW,
        timeout=timedelta(seconds=120),
    )


def contest(job: Job, rank: int, placement: str, num_micros: int) -> dict[str, Timing]:
    """Time all contestants; wall times are the slowest rank's, losses are global."""
    config = decoder(job.hidden, job.layers)
    engine = engine_for(job, rank, placement, num_micros)

    def engine_step(number: int) -> float:
        batches = micro_batches(number, rank, num_micros, (job.batch, job.sequence), config.vocab_size)
        return engine.step([MicroBatch(*batch) for batch in batches], ADAMW.lr).loss

    steps: dict[str, Step] = {
        "FSDP2": fsdp_step(job, rank, placement, num_micros, all_to_all=False),
        "a2a": fsdp_step(job, rank, placement, num_micros, all_to_all=True),
        "engine": engine_step,
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
    low, high = spread(engine.wall_s, fsdp.wall_s)
    return [
        placement,
        str(num_micros),
        str(len(fsdp.wall_s)),
        *(f"{statistics.median(timing.wall_s) * 1e3:.0f}" for timing in (fsdp, other, engine)),
        f"{ratio(engine.wall_s, fsdp.wall_s):.3f} ({low:.3f} - {high:.3f})",
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--per-node", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--micros", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--check", action="store_true", help="exit 1 when the target is missed")
    options = parser.parse_args()
    job = Job(
        world=options.world,
        per_node=options.per_node,
        hidden=options.hidden,
        layers=options.layers,
        batch=options.batch,
        sequence=options.sequence,
        rounds=options.rounds,
        micros=tuple(options.micros),
        placements=tuple(options.placements),
    )
    size = num_params(decoder(job.hidden, job.layers)) / 1e6
    print(f"{size:.2f} M parameters, {job.batch} x {job.sequence} tokens a rank, {job.world} gloo ranks, fp32\n")
    found = multiprocessing.get_context("spawn").Value("d", 0.0)
    spawn(work, (job, free_port(), found), nprocs=job.world)  # type: ignore[no-untyped-call]
    print(f"\nworst ratio {found.value:.3f}, target {TARGET}: {'met' if found.value <= TARGET else 'MISSED'}")
    return 1 if options.check and found.value > TARGET else 0


if __name__ == "__main__":
    sys.exit(main())
