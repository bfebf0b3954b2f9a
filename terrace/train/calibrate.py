"""A second's measurement at the start of a run, so that the prediction is about this machine.

Measured on all ranks at once, since they may share cores and links: the FLOP/s that one decoder layer
reaches in its forward, the bandwidth of memory, and per tier latency and bandwidth of an all-gather (from
a small and a large message, back to back). To every latency comes what messages cost beyond that when they
alternate with computation, as they do in a step: a rank waits for partners that are not quite there, while
another one may use the core. On a tier that only stages of a pipeline talk over, every stage sends to the next one and
then to the one before, all pairs at once; what stages wait for each other the simulation plays, so nothing is added.
The result is the cluster with these constants in place of its own.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from terrace.cluster import Cluster, Kernels, Tier
from terrace.comm import Ledger, Pacer, StageP2P, TierGroup, codecs
from terrace.comm.collectives import DTYPES
from terrace.comm.exchange import all_gather
from terrace.model.config import forward_flops
from terrace.model.decoder import build_blocks
from terrace.model.init import initialise
from terrace.plan import MessageClass
from terrace.plan.context import is_context_parallel, local_tokens
from terrace.plan.hops import lossy_messages
from terrace.plan.mesh import Mesh
from terrace.runtime.compiled import compile_blocks
from terrace.runtime.engine import Engine
from terrace.train.config import RunConfig

_SOURCE = "measured at the start of the run"
_SMALL_BYTES, _LARGE_BYTES = 4_096, 1_048_576  # per rank; around the sizes of a small model's messages
_BUDGET_S = 0.3
_REPEATS = 20  # of a collective: every member must make the same number of calls

Work = Callable[[], object]
Progress = Callable[[str], None]


def calibrate(engine: Engine, run: RunConfig, progress: Progress = lambda what: None) -> Cluster:
    """Return `run.cluster` with measured constants, the same on every rank. Every rank calls this.

    `progress` is told what is measured next.
    """
    progress("compute and memory")
    return measure(engine, *_layer(engine, run), progress)


def measure(engine: Engine, layer: Work, flops: int, progress: Progress = lambda what: None) -> Cluster:
    """Return the cluster of `engine` with measured constants; `layer` is a computation, of so many FLOPs.

    The rest is as for `calibrate`.
    """
    cluster, plan = engine.program.cluster, engine.program.plan
    layer_s = _mean_seconds(engine, layer)
    own = [flops / layer_s, _memory_bytes_per_s(engine)]
    own.append(_codec_bytes_per_s(engine) or own[1])
    mesh = engine.program.everyone
    crossed = [index for index, degree in enumerate(mesh.degrees) if degree > 1]
    groups = [
        engine.comm.groups.of(max(crossed), mesh.axes, index) for index in crossed
    ]  # those of the control message
    for group in groups:
        progress(group.tier)
        own += _latency_and_bandwidth(engine, group)
    progress("messages between computation")
    own.append(_skew_s(engine, groups, layer, layer_s))
    edges = _edge_tiers(engine)
    for tier in edges:
        progress(f"{cluster.tiers[tier].name} between stages")
        own += _between_stages(engine, tier)
    progress("the figures of all ranks")
    everyone = torch.tensor(engine.comm.exchange(own), dtype=torch.float64)  # (world size, constants)
    mean = everyone.nanmean(0).tolist()  # a stage may have no neighbour over a tier
    device = replace(
        cluster.device,
        peak_flops_per_s={**cluster.device.peak_flops_per_s, plan.compute: mean[0]},
        memory_bandwidth_bytes_per_s=mean[1],
        # What was measured is what kernels reach, so nothing is left to scale; a codec may reach less.
        kernels=Kernels(codec=min(1.0, mean[2] / mean[1])),
        marks={f"peak_flops_per_s.{plan.compute}": "measured", "memory_bandwidth_bytes_per_s": "measured"},
        source=_SOURCE,
    )
    after = 3 + 2 * len(groups)
    skew_s, links = mean[after], mean[after + 1 :]
    constants = {
        group.tier: (latency_s + skew_s, bandwidth)
        for group, latency_s, bandwidth in zip(groups, mean[3:after:2], mean[4:after:2], strict=True)
    }
    constants |= {
        cluster.tiers[tier].name: (latency_s, bandwidth)
        for tier, latency_s, bandwidth in zip(edges, links[::2], links[1::2], strict=True)
    }
    tiers = [
        _measured(tier, *constants[tier.name], engine.comm.pacer) if tier.name in constants else tier
        for tier in cluster.tiers
    ]
    return replace(cluster, device=device, tiers=tuple(tiers))


def _measured(tier: Tier, latency_s: float, bandwidth_bytes_per_s: float, pacer: Pacer | None) -> Tier:
    if pacer is not None:  # what was measured is the link under the pace
        latency_s = max(latency_s, pacer.least_s(tier.name, 0))
        bandwidth_bytes_per_s = min(
            bandwidth_bytes_per_s, 1 / (pacer.least_s(tier.name, 1) - pacer.least_s(tier.name, 0))
        )
    return replace(
        tier,
        latency_s=latency_s,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        direct=False,  # what was measured is what messages of this run's groups reach
        efficiency=1.0,
        half_bytes=0.0,
        marks={"latency_s": "measured", "bandwidth_bytes_per_s": "measured"},
        source=_SOURCE,
    )


def _layer(engine: Engine, run: RunConfig) -> tuple[Work, int]:
    """Return a call that runs one layer forward on as many tokens of a micro-batch as a rank holds, and its FLOPs.

    The layer attends by itself: what ranks that attend together send each other is no part of it.
    """
    config, dtype = replace(run.model, num_layers=1, vocab_size=1), DTYPES[run.plan.compute]
    blocks = build_blocks(config)
    initialise(blocks, config, 0, dtype, engine.device)
    mesh, sizes = Mesh.of(run.cluster, run.plan), (run.plan.micro_batch, run.train.sequence)
    if is_context_parallel(mesh, run.plan):
        sizes = (1, local_tokens(run.plan, mesh, run.train.sequence))
    x = torch.randn((*sizes, config.hidden_size), device=engine.device, dtype=dtype, requires_grad=True)
    if run.train.compile:
        compile_blocks(blocks)
        for _ in range(2):  # the tables of RoPE are made by the first call and read by the second: two graphs
            blocks[1](x)
    return lambda: blocks[1](x), forward_flops(config, 1, *sizes)


def _memory_bytes_per_s(engine: Engine) -> float:
    a = torch.zeros(_LARGE_BYTES, device=engine.device)
    return 3 * a.nbytes / _mean_seconds(engine, lambda: a.add_(a))


def _codec_bytes_per_s(engine: Engine) -> float:
    """Return the bytes that coding and decoding moves in a second, or 0 where no message is in a block format."""
    cluster, plan = engine.program.cluster, engine.program.plan
    wires = {
        wire
        for message in lossy_messages(engine.program.layout, plan)
        for tier in cluster.tiers
        if (wire := plan.wire_format(message, tier.name)).block
    }
    if not wires:
        return 0.0
    wire = min(wires, key=lambda each: each.name)
    values = torch.randn((1, _LARGE_BYTES // 2), device=engine.device).to(DTYPES[plan.compute])
    coded = torch.empty((1, wire.message_bytes(values.numel())), dtype=torch.uint8, device=engine.device)

    def both() -> None:
        codecs.encode(values, wire, coded, "a measurement")
        codecs.decode(coded, wire, values)

    return 2 * (values.nbytes + coded.nbytes) / _mean_seconds(engine, both)


def _latency_and_bandwidth(engine: Engine, group: TierGroup) -> list[float]:
    copies = group.size - 1
    small_s, large_s = (
        _mean_seconds(engine, _gather(engine, group, size), _REPEATS) for size in (_SMALL_BYTES, _LARGE_BYTES)
    )
    return _fitted(small_s / copies, large_s / copies)


def _fitted(small_s: float, large_s: float) -> list[float]:
    """Return latency and bandwidth from the seconds of a small and of a large message."""
    if large_s <= small_s:  # noise hides the slope: all of the larger message's time counts as bandwidth
        return [0.0, _LARGE_BYTES / large_s]
    bandwidth = (_LARGE_BYTES - _SMALL_BYTES) / (large_s - small_s)
    return [max(0.0, small_s - _SMALL_BYTES / bandwidth), bandwidth]


def _edge_tiers(engine: Engine) -> list[int]:
    """Return the indexes of the tiers that neighbouring stages talk over and no group of data or tensor ranks does."""
    program = engine.program
    crossed = {program.mesh.edge_tier(*pair) for pair in program.stage.pairs if pair[1] == pair[0] + 1}
    return sorted(tier for tier in crossed if program.everyone.degrees[tier] == 1)


def _between_stages(engine: Engine, tier: int) -> list[float]:
    """Return latency and bandwidth of messages over a tier to the next stage and the one before.

    Not a number on a rank whose neighbours are not over this tier: it takes part in the barriers alone.
    """
    program = engine.program
    stage, pairs = program.stage.index, program.stage.pairs
    onward, back = (
        other if pair in pairs and program.mesh.edge_tier(*pair) == tier else None
        for other, pair in ((stage + 1, (stage, stage + 1)), (stage - 1, (stage - 1, stage)))
    )
    between = engine.comm.stage_p2p(Ledger())
    small_s, large_s = (
        _mean_seconds(engine, _exchange(engine, between, onward, back, size), _REPEATS) / 2
        for size in (_SMALL_BYTES, _LARGE_BYTES)
    )
    between.close()
    return [math.nan, math.nan] if onward is back is None else _fitted(small_s, large_s)


def _exchange(engine: Engine, between: StageP2P, onward: int | None, back: int | None, num_bytes: int) -> Work:
    """Return a call in which every stage sends a message to the next one, then one to the stage before."""
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8, device=engine.device) for _ in range(2))

    def shift(target: int | None, source: int | None) -> None:
        arriving = None if source is None else between.receive(received, source)
        if target is not None:
            between.send(MessageClass.PIPELINE, sent, target).wait()
        if arriving is not None:
            arriving.wait()

    def both() -> None:
        shift(onward, back)
        shift(back, onward)

    return both


def _skew_s(engine: Engine, groups: Sequence[TierGroup], layer: Work, layer_s: float) -> float:
    """Return what a message between computation costs beyond one back to back, averaged over tiers and neighbours."""
    if not groups:
        return 0.0
    gathers = [_gather(engine, group, _SMALL_BYTES) for group in groups]

    def messages() -> None:
        for gather in gathers:
            gather()

    def alternating() -> None:
        for gather in gathers:
            layer()
            gather()

    together_s, apart_s = (_mean_seconds(engine, work, _REPEATS) for work in (alternating, messages))
    neighbours = sum(group.size - 1 for group in groups)
    return max(0.0, together_s - len(groups) * layer_s - apart_s) / neighbours


def _gather(engine: Engine, group: TierGroup, num_bytes: int) -> Work:
    own = torch.zeros(num_bytes, dtype=torch.uint8, device=engine.device)
    whole = torch.zeros(num_bytes * group.size, dtype=torch.uint8, device=engine.device)
    return lambda: all_gather(whole, own, group)


def _mean_seconds(engine: Engine, work: Work, repeats: int | None = None) -> float:
    """Return the mean time of a call, all ranks starting together; for about the budget, or `repeats` times."""
    work()
    if dist.is_initialized() and engine.program.cluster.world_size > 1:
        dist.barrier()
    _finish(engine)
    begin, calls = time.perf_counter(), 0
    while calls < repeats if repeats else (calls < 3 or time.perf_counter() - begin < _BUDGET_S):
        work()
        calls += 1
    _finish(engine)
    return (time.perf_counter() - begin) / calls


def _finish(engine: Engine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
