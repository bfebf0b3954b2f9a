"""Measures this machine for about a second at the start of a run, so that the prediction fits it.

All ranks measure at once, since they may share cores and links: the FLOP/s of one decoder layer's forward, memory
bandwidth, and per tier the latency and bandwidth of an all-gather (from a small and a large message, back to back).
Each latency also includes the extra cost of messages that alternate with computation, as in a step: a rank waits for
partners that are not quite ready, while another may use the core. On a tier used only between pipeline stages, every
stage sends to the next one and then to the previous one, all pairs at once; the simulation models the waits between
stages, so nothing is added there. The result is the cluster with these constants in place of its own.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from terrace.cluster.below import Mark, Medium
from terrace.cluster.cluster import Cluster, Kernels, Tier
from terrace.cluster.members import Member, slowest_link
from terrace.comm import codecs
from terrace.comm.collectives import DTYPES
from terrace.comm.exchange import all_gather
from terrace.comm.groups import TierGroup
from terrace.comm.ledger import Ledger
from terrace.comm.pace import Pace
from terrace.comm.process_group import barrier
from terrace.comm.stage_p2p import StageP2P
from terrace.model.attention_plans import choose_kernel
from terrace.model.blocks import block_specs, forward_flops
from terrace.model.decoder import build_blocks
from terrace.model.facts import one_layer
from terrace.model.init import initialise
from terrace.model.liger import serve
from terrace.plan.context import is_context_parallel, local_tokens
from terrace.plan.keep import CORES, HOST
from terrace.plan.routes import coded_messages
from terrace.plan.wire import MessageClass
from terrace.program.report import StepReport, plain, read_plain
from terrace.runtime.clock import wait_for
from terrace.runtime.compiled import compile_blocks, compile_parts
from terrace.runtime.engine import Engine
from terrace.runtime.kept.host_rate import update_rate
from terrace.runtime.scaled_linear import scale_matrices
from terrace.runtime.scaling import Scaling
from terrace.simulate.links import latency_and_rate
from terrace.simulate.step import Prediction
from terrace.train.config import RunConfig
from terrace.train.prediction import predict
from terrace.train.rules import parts_of

_SOURCE = "measured at the start of the run"
_SMALL_BYTES, _LARGE_BYTES = 4_096, 1_048_576  # per rank; around the sizes of a small model's messages
_BUDGET_S = 0.2
_READ, _WRITTEN = "{}: pages read", "{}: pages written"  # figures of rows on a medium
_REPEATS = 20  # of a collective: every member must make the same number of calls
_FEWEST = 3
_WINDOWS, _AGREE, _LONGEST = 5, 1.5, 4  # a busy moment is measured longer, up to so many budgets

Work = Callable[[], object]
Progress = Callable[[str], None]


def calibrate(engine: Engine, run: RunConfig, progress: Progress = lambda what: None) -> Cluster:
    """`run.cluster` with measured constants, equal on all ranks. Every rank calls this.

    `progress` receives the name of each measurement before it starts.
    """
    progress("compute and memory")
    return measure(engine, *_layer(engine, run), progress)


def predict_once(engine: Engine, run: RunConfig, cluster: Cluster) -> list[StepReport]:
    """The predicted step of every stage, simulated by rank 0 alone, because its cost grows with the number of stages.

    Every rank calls this.
    """
    return played_once(engine, lambda: predict(run, cluster))


def played_once(engine: Engine, play: Callable[[], Prediction]) -> list[StepReport]:
    """Runs `play` on rank 0 alone and broadcasts its reports. Every rank calls this."""
    own = [plain(report) for report in play().reports] if engine.rank == 0 else None
    return [read_plain(report) for report in engine.comm.exchange(own)[0]]


def measure(engine: Engine, layer: Work, flops: int, progress: Progress = lambda what: None) -> Cluster:
    """Like `calibrate`, with the given computation `layer` of `flops` FLOPs in place of a decoder layer."""
    cluster, plan = engine.program.cluster, engine.program.plan
    layer_s = _mean_seconds(engine, layer)
    # Two operands are read and one written.
    a = torch.zeros(_LARGE_BYTES, device=engine.device)
    memory_bytes_per_s = 3 * a.nbytes / _mean_seconds(engine, lambda: a.add_(a))
    own = {"flops": flops / layer_s, "memory": memory_bytes_per_s}
    own["codec"] = _codec_bytes_per_s(engine) or memory_bytes_per_s
    layout = engine.program.model.stage_layout
    crossed = [index for index, degree in enumerate(layout.degrees) if degree > 1]
    # The groups of the control message.
    groups = [engine.comm.groups.of(max(crossed), layout, index) for index in crossed]
    links: dict[str, tuple[float, float]] = {}  # tier -> latency, bandwidth
    for group in groups:
        progress(group.tier)
        links[group.tier] = _latency_and_bandwidth(engine, group)
    progress("messages between computation")
    # Repeats follow the slowest rank's layer time, so that all ranks make the same number of calls. A difference of two
    # means needs more samples than a mean.
    round_s = len(groups) * max(engine.comm.exchange(layer_s))
    repeats = max(_FEWEST, min(_REPEATS, int(2 * _BUDGET_S / round_s))) if groups else 0
    own["skew"] = _skew_s(engine, groups, layer, layer_s, repeats)
    for tier in _edge_tiers(engine):
        name = cluster.tiers[tier].name
        progress(f"{name} between stages")
        links[name] = _between_stages(engine, tier)
    progress("the media below the device")
    for medium in plan.keep.media:
        own[medium] = engine.below.rate(medium) or math.nan  # a stage may keep nothing there
        own[_READ.format(medium)], own[_WRITTEN.format(medium)] = engine.below.page_rates(medium)
    if plan.keep.hands_over:
        own[CORES] = engine.below.update_rate(update_rate())
    progress("the figures of all ranks")
    everyone = torch.tensor(
        engine.comm.exchange([*own.values(), *(figure for link in links.values() for figure in link)]),
        dtype=torch.float64,
    )  # (world size, figures)
    # Every rank averages the same figures, so that all build the same cluster.
    figures = iter(everyone.nanmean(0).tolist())  # a stage may have no neighbour over a tier
    mean = {name: next(figures) for name in own}
    device = replace(
        cluster.device,
        peak_flops_per_s={**cluster.device.peak_flops_per_s, plan.compute: mean["flops"]},
        memory_bandwidth_bytes_per_s=mean["memory"],
        # Kernels reach the measured rates, so no efficiency remains to scale by; a codec may reach less.
        kernels=Kernels(codec=min(1.0, mean["codec"] / mean["memory"])),
        marks={f"peak_flops_per_s.{plan.compute}": "measured", "memory_bandwidth_bytes_per_s": "measured"},
        source=_SOURCE,
        below=_below(engine, mean),
    )
    measured = {name: (next(figures), next(figures)) for name in links}
    # Tiers inside a stage include the skew. Tiers used only between stages do not: the simulation already models the
    # waits there.
    skews = dict.fromkeys((group.tier for group in groups), mean["skew"])
    tiers = [
        _measured(tier, measured[tier.name][0] + skews.get(tier.name, 0.0), measured[tier.name][1], engine.comm.pacer)
        if tier.name in measured
        else tier
        for tier in cluster.tiers
    ]
    if plan.shares or tiers[-1].members:
        flops_per_s = everyone[:, list(own).index("flops")].reshape(tiers[-1].size, -1).mean(1) / mean["flops"]
        tiers[-1] = replace(
            tiers[-1], members=_members(cluster.tiers[-1], flops_per_s.tolist(), _scale(cluster, engine.comm.pacer))
        )
    return replace(cluster, device=device, tiers=tuple(tiers))


def _members(tier: Tier, speeds: Sequence[float], scale: float) -> tuple[Member, ...]:
    """Members of these speeds, with the links that the cluster's file gives them: a run measures all links at once."""
    given = [each for each in tier.members or (Member(count=tier.size),) for _ in range(each.count)]
    return tuple(
        Member(
            speed=speed,
            bandwidth_bytes_per_s=each.bandwidth_bytes_per_s and scale * each.bandwidth_bytes_per_s,
            latency_s=each.latency_s and each.latency_s / scale,
        )
        for each, speed in zip(given, speeds, strict=True)
    )


def _scale(cluster: Cluster, pacer: Pace) -> float:
    """Rates of paced links over the cluster's; 1 without a pace."""
    tier = cluster.alike[0][0].tiers[-1]
    if not pacer.is_limited:
        return 1.0
    byte_s = pacer.least_s(tier.name, 1) - pacer.least_s(tier.name, 0)
    return 1 / (byte_s * tier.bandwidth_bytes_per_s)


def _measured(tier: Tier, latency_s: float, bandwidth_bytes_per_s: float, pacer: Pace) -> Tier:
    if pacer.is_limited:  # the measurement saw the link without the pace
        # That of the slowest member; the tier's own link holds for members that have none.
        slowest, latest_s = slowest_link(tier.members, tier.bandwidth_bytes_per_s, tier.latency_s)
        own = tier.bandwidth_bytes_per_s / slowest, tier.latency_s / latest_s if latest_s else 1.0
        latency_s = max(latency_s, own[1] * pacer.least_s(tier.name, 0))
        byte_s = pacer.least_s(tier.name, 1) - pacer.least_s(tier.name, 0)
        bandwidth_bytes_per_s = min(bandwidth_bytes_per_s, own[0] / byte_s)
    return replace(
        tier,
        latency_s=latency_s,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        direct=False,  # the measured rate is already that of this run's groups, by its algorithm
        links=(),
        by_degree=(),
        tree=None,
        contention=(),
        efficiency=1.0,
        half_bytes=0.0,
        marks={"latency_s": "measured", "bandwidth_bytes_per_s": "measured"},
        source=_SOURCE,
    )


def _layer(engine: Engine, run: RunConfig) -> tuple[Work, int]:
    # One layer forward on a rank's local tokens, with local attention: context-axis exchanges are priced separately. If
    # layers differ in their windows, one with the widest window represents all.
    config = one_layer(run.model)
    dtype = DTYPES[run.plan.compute]
    blocks = build_blocks(config)
    choose_kernel(blocks, run.train.attention)
    serve(blocks, run.train.kernels, engine.device, parts_of(run))
    initialise(blocks, config, 0, dtype, engine.device)
    scaling, specs = Scaling.of(run.plan, engine.device), block_specs(config)
    if scaling is not None:
        named = dict(blocks[1].named_parameters())
        scale_matrices([(param, named[param.name]) for param in specs[1].params], specs, 1, scaling)
    mesh, sizes = run.mesh, (run.plan.micro_batch, run.train.sequence)
    if is_context_parallel(mesh, run.plan):
        sizes = (1, local_tokens(run.plan, mesh, run.train.sequence))
    x = torch.randn((*sizes, specs[1].operations.hidden.numel), device=engine.device, dtype=dtype, requires_grad=True)
    if run.train.compile:
        (compile_blocks if run.train.kernels == "torch" else compile_parts)(blocks)
        for _ in range(2):  # the tables of RoPE are made by the first call and read by the second: two graphs
            blocks[1](x)
    return lambda: blocks[1](x), forward_flops(config, 1, *sizes)


def layer_flops_per_s(engine: Engine, run: RunConfig) -> float:
    """FLOP/s of a decoder layer's forward, measured now on this rank alone; not collective."""
    layer, flops = _layer(engine, run)
    layer()
    wait_for(engine.device)
    return flops / _window_seconds(engine, layer)


def _codec_bytes_per_s(engine: Engine) -> float:
    cluster, plan = engine.program.cluster, engine.program.plan
    wires = {
        wire
        for message in coded_messages(engine.program.layout, plan)
        for tier in cluster.tiers
        for wire in plan.wire_formats(message, tier.name)
        if wire.block
    }
    if not wires:
        return 0.0
    # One codec represents all; choosing it by name gives every rank the same choice.
    wire = min(wires, key=lambda each: each.name)
    values = torch.randn((1, _LARGE_BYTES // 2), device=engine.device).to(DTYPES[plan.compute])
    coded = torch.empty((1, wire.message_bytes(values.numel())), dtype=torch.uint8, device=engine.device)

    def both() -> None:
        codecs.encode(values, wire, coded)
        codecs.decode(coded, wire, values)

    return 2 * (values.nbytes + coded.nbytes) / _mean_seconds(engine, both)


def _latency_and_bandwidth(engine: Engine, group: TierGroup) -> tuple[float, float]:
    # An all-gather over a ring sends size - 1 messages one after the other.
    copies = group.size - 1
    small_s, large_s = (_message_s(engine, _gather(engine, group, size)) for size in (_SMALL_BYTES, _LARGE_BYTES))
    return latency_and_rate(_SMALL_BYTES, small_s / copies, _LARGE_BYTES, large_s / copies)


def _edge_tiers(engine: Engine) -> list[int]:
    program = engine.program
    # Tiers that neighbouring stages use and no group of data or tensor ranks does.
    crossed = {program.mesh.edge_tier(*pair) for pair in program.stage.pairs if pair[1] == pair[0] + 1}
    return sorted(tier for tier in crossed if program.model.stage_layout.degrees[tier] == 1)


def _between_stages(engine: Engine, tier: int) -> tuple[float, float]:
    program = engine.program
    stage, pairs = program.stage.index, program.stage.pairs
    # Every rank takes part in the barriers; one without a neighbour over this tier reports NaN.
    onward, back = (
        other if pair in pairs and program.mesh.edge_tier(*pair) == tier else None
        for other, pair in ((stage + 1, (stage, stage + 1)), (stage - 1, (stage - 1, stage)))
    )
    between = engine.comm.stage_p2p(Ledger())
    small_s, large_s = (
        _message_s(engine, _exchange(engine, between, onward, back, size)) / 2 for size in (_SMALL_BYTES, _LARGE_BYTES)
    )
    between.close()
    if onward is back is None:
        return math.nan, math.nan
    return latency_and_rate(_SMALL_BYTES, small_s, _LARGE_BYTES, large_s)


def _exchange(engine: Engine, between: StageP2P, onward: int | None, back: int | None, num_bytes: int) -> Work:
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8, device=engine.device) for _ in range(2))

    # The receive is posted first, so that no pair of sends waits for each other.
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


def _skew_s(engine: Engine, groups: Sequence[TierGroup], layer: Work, layer_s: float, repeats: int) -> float:
    if not groups:
        return 0.0
    # The extra cost of messages between computation, compared with messages back to back, per tier and neighbour.
    gathers = [_gather(engine, group, _SMALL_BYTES) for group in groups]

    def messages() -> None:
        for gather in gathers:
            gather()

    def alternating() -> None:
        for gather in gathers:
            layer()
            gather()

    together_s = _mean_seconds(engine, alternating, repeats)
    apart_s = _mean_seconds(engine, messages, _REPEATS)
    neighbours = sum(group.size - 1 for group in groups)
    return max(0.0, together_s - len(groups) * layer_s - apart_s) / neighbours


def _gather(engine: Engine, group: TierGroup, num_bytes: int) -> Work:
    own = torch.zeros(num_bytes, dtype=torch.uint8, device=engine.device)
    whole = torch.zeros(num_bytes * group.size, dtype=torch.uint8, device=engine.device)
    return lambda: all_gather(whole, own, group)


def _message_s(engine: Engine, message: Work) -> float:
    # Over a slow link, one call may exceed the whole budget.
    once_s = _mean_seconds(engine, message, 1)
    return _mean_seconds(engine, message, _REPEATS) if max(engine.comm.exchange(once_s)) < _BUDGET_S else once_s


def _below(engine: Engine, rates: Mapping[str, float]) -> Mapping[str, Medium]:
    """The media below the device, those of the plan with the rate that all ranks reach at once."""
    found = dict(engine.program.cluster.device.below)
    for name in engine.program.plan.keep.media:
        marks: dict[str, Mark]
        if rates[name] > 0:
            whole = rates[name] * found[name].sharers
            marks = {"read_bytes_per_s": "measured", "write_bytes_per_s": "measured"}
            found[name] = replace(found[name], read_bytes_per_s=whole, write_bytes_per_s=whole, marks=marks)
        pages = [rates[each.format(name)] * found[name].sharers for each in (_READ, _WRITTEN)]
        if not any(map(math.isnan, pages)):
            marks = {**found[name].marks, "read_pages_per_s": "measured", "write_pages_per_s": "measured"}
            found[name] = replace(found[name], read_pages_per_s=pages[0], write_pages_per_s=pages[1], marks=marks)
    if CORES in rates:
        host = found[HOST]
        measured: dict[str, Mark] = {**host.marks, "update_bytes_per_s": "measured"}
        found[HOST] = replace(host, update_bytes_per_s=rates[CORES] * host.sharers, marks=measured)
    return found


def _mean_seconds(engine: Engine, work: Work, repeats: int | None = None) -> float:
    work()
    if dist.is_initialized() and engine.program.cluster.world_size > 1:
        barrier()
    wait_for(engine.device)
    # Either as many calls as fit the budget, or a fixed number, which all ranks must share when they exchange messages.
    if not repeats:
        return _window_seconds(engine, work)
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    wait_for(engine.device)
    return (time.perf_counter() - begin) / repeats


def _window_seconds(engine: Engine, work: Work) -> float:
    """Seconds per call of `work`: the median over several time windows.

    A burst of another program lengthens some windows, so more are measured while the median is far from the shortest
    one.
    """
    windows: list[float] = []
    begin = time.perf_counter()
    while True:
        started, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - started < _BUDGET_S / _WINDOWS:
            work()
            calls += 1
        wait_for(engine.device)
        windows.append((time.perf_counter() - started) / calls)
        spent_s, median_s = time.perf_counter() - begin, statistics.median(windows)
        if len(windows) < _FEWEST or spent_s < _BUDGET_S:
            continue
        if median_s <= _AGREE * min(windows) or spent_s >= _LONGEST * _BUDGET_S:
            return median_s
