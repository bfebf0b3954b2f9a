"""All measurements of one rank, in order, within a time budget that is split over the parts."""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import combinations
from pathlib import Path

import torch

from terrace.accelerator import HOST, has_streams, num_cores
from terrace.base.errors import ConfigError, TerraceError
from terrace.cluster.cluster import Cluster
from terrace.comm.ledger import Ledger
from terrace.comm.pace import UNPACED, Pace, pace_of
from terrace.comm.process_group import rank_device
from terrace.launch.start import pace
from terrace.launch.watchdog import watch as watchdog
from terrace.launch.world import World
from terrace.plan.keep import Keep
from terrace.plan.kept_rows import RowPages
from terrace.probe.below import NO_MEDIUM, MediumSample
from terrace.probe.compute import (
    COMPILES_BY,
    TRAINS_IN,
    Say,
    layer_passes,
    measure_attention,
    measure_gemms,
    measure_layers,
    measure_optimizer,
    measure_passes,
)
from terrace.probe.grid import overlap_layer
from terrace.probe.links import FIRST_BYTES, LARGEST_BYTES, TierLinks, aligned, measure_tier
from terrace.probe.samples import PairSample, Samples, TierSamples
from terrace.probe.sustained import HEAT_S, measure_kernels, measure_speeds, measure_sustained
from terrace.probe.timing import Stopwatch
from terrace.runtime.clock import NO_CLOCK, make_clock
from terrace.runtime.kept.channel import Channel
from terrace.runtime.kept.file import KeptFile
from terrace.runtime.kept.host import HostMemory
from terrace.runtime.kept.host_rate import update_rate
from terrace.runtime.kept.ring import Ring, make_slots
from terrace.runtime.kept.rows import RowsOnDisk
from terrace.runtime.malloc import keep_freed_memory

_PIECE_BYTES = 8 * Keep().piece  # of the moments of AdamW in fp32
_NUM_PIECES = 12
# Each has a page of 4 kB: 134 MB, of which random places are rarely neighbours.
_ROWS = RowPages(medium="disk", num_rows=1 << 15, width=256, formats=("fp32",) * 3)

_TIMEOUT_S = 120.0  # without progress of a rank: the probe has stopped
# Shares of the budget; they sum to one.
_PARTS = {
    "gemms": 0.2,
    "passes": 0.07,
    "attention": 0.06,
    "kernels": 0.03,
    "layers": 0.13,
    "optimizer": 0.05,
    "links": 0.28,
    "overlap": 0.11,
    "pairs": 0.07,
}
_HEATING = 0.5  # of the budget, and beside it


def measure(world: World, cluster: Cluster, seconds: float, say: Say) -> Samples:
    """Measure on all ranks of `cluster` for about `seconds`. A collective: every rank gets the same values.

    `say` is called with a description of each measurement before it starts. Raises `HangError` when another rank
    stopped, `ConfigError` when `TERRACE_PACE` is set on GPUs.
    """
    device, rate = rank_device(), pace()
    if device.type == "cpu":
        keep_freed_memory()  # as in training
    elif rate is not None:
        raise ConfigError("TERRACE_PACE paces messages of CPU ranks only: unset it, or set CUDA_VISIBLE_DEVICES=''")
    with watched(world, say) as progress:
        return _measure(world, cluster, device, seconds, pace_of(cluster, rate), progress)


@contextmanager
def watched(world: World, say: Say) -> Iterator[Say]:
    """Watchdog over measurements on all ranks; yields a callback that reports progress to it and to `say`."""
    everyone, counter = tuple(range(world.world_size)), 0
    with watchdog(world, timeout_s=_TIMEOUT_S) as dog, dog.guard():

        def progress(what: str) -> None:
            nonlocal counter
            counter += 1
            dog.at(0, counter, f"MEASURE {what}", everyone)
            say(what)

        yield progress


def _measure(world: World, cluster: Cluster, device: torch.device, seconds: float, pacer: Pace, say: Say) -> Samples:
    stopwatch = Stopwatch(world.world_size, device)
    budget = {part: share * seconds for part, share in _PARTS.items()}
    sustained, heat_s = None, min(HEAT_S[device.type], _HEATING * seconds)
    if heat_s:
        sustained = measure_sustained(stopwatch, TRAINS_IN[device.type], heat_s, say)
    copies, norms, launch_s = measure_passes(stopwatch, budget["passes"], say)
    gemms = measure_gemms(stopwatch, budget["gemms"], say)
    # Attention and layers are sized by the measured speed of products.
    peak = max(sample.flops_per_s for sample in gemms if sample.dtype == TRAINS_IN[device.type])
    attention = measure_attention(stopwatch, peak, budget["attention"], say)
    longest = max(attention, key=lambda sample: sample.sequence)
    kernels = measure_kernels(stopwatch, longest, budget["kernels"])
    layers, host_layer_s = measure_layers(stopwatch, peak, budget["layers"], say, COMPILES_BY[device.type])
    rates: tuple[float, ...] = ()
    if cluster.tiers[-1].members:
        rates = measure_speeds(stopwatch, TRAINS_IN[device.type], budget["optimizer"])
    optimizer = measure_optimizer(stopwatch, budget["optimizer"], say)
    tiers, pairs = _links(world, cluster, stopwatch, budget, pacer, say)
    say("the disk of the working folder")
    disk = measure_disk(stopwatch, Path(), world.local_world_size)
    say("the host's memory and cores")
    host = measure_host(stopwatch, device, world.local_world_size)
    return Samples(
        device=device.type,
        num_cores=num_cores(device),
        gemms=tuple(gemms),
        copies=tuple(copies),
        norms=tuple(norms),
        attention=tuple(attention),
        layers=tuple(layers),
        launch_s=launch_s,
        host_layer_s=host_layer_s,
        optimizer=tuple(optimizer),
        tiers=tiers,
        pairs=pairs,
        rates=rates,
        sustained=sustained,
        attention_kernels=kernels,
        disk=disk,
        host=host,
    )


def _links(
    world: World, cluster: Cluster, stopwatch: Stopwatch, budget: Mapping[str, float], pacer: Pace, say: Say
) -> tuple[tuple[TierSamples, ...], tuple[PairSample, ...]]:
    crossed = [index for index, tier in enumerate(cluster.tiers) if tier.size > 1]
    compute, timeout = layer_passes(stopwatch, overlap_layer(stopwatch.device.type)), timedelta(seconds=2 * _TIMEOUT_S)
    tiers, pairs, links = list[TierSamples](), list[PairSample](), list[TierLinks]()
    for index in crossed:
        links.append(TierLinks(cluster, index, world.rank, stopwatch.device, timeout, pacer))
        own_s, overlap_s = (budget[part] / len(crossed) for part in ("links", "overlap"))
        tiers.append(measure_tier(stopwatch, links[-1], compute, own_s, overlap_s, say))
    both = list(combinations(links, 2))
    for inner, outer in both:
        say(f"messages on tiers {inner.name} and {outer.name} at once")
        pairs.append(measure_pair(stopwatch, inner, outer, budget["pairs"] / len(both)))
    for each in links:
        each.close()
    return tuple(tiers), tuple(pairs)


_ROUNDS = 5  # each of either tier alone and of both


def measure_pair(watch: Stopwatch, one: TierLinks, other: TierLinks, budget_s: float) -> PairSample:
    """Time gathers on `one` tier alone, on the `other` alone, and on both at once, in about `budget_s`.

    The numbers of gathers are chosen to take about the same time alone. Every rank must call this at the same point.
    """
    each_s = budget_s / (3 * _ROUNDS + 4)
    both = one, other
    sizes = [_size(watch, links, each_s) for links in both]
    seconds = [
        watch.seconds(links.call("gather", size), each_s, agreed=True) for links, size in zip(both, sizes, strict=True)
    ]
    numbers = [max(1, round(max(seconds) / taken_s)) for taken_s in seconds]
    starts = [links.start("gather", size) for links, size in zip(both, sizes, strict=True)]

    def sending(*which: int) -> Callable[[], None]:
        def send() -> None:
            waits = [starts[index]() for index in which for _ in range(numbers[index])]
            for wait in waits:
                wait()

        return send

    # Interleaved, so that a lasting disturbance affects all three.
    rounds = [
        [watch.seconds(work, each_s, agreed=True) for work in (sending(0), sending(1), sending(0, 1))]
        for _ in range(_ROUNDS)
    ]
    one_s, other_s, together_s = (statistics.median(column) for column in zip(*rounds, strict=True))
    return PairSample(tiers=(one.name, other.name), seconds=(one_s, other_s), together_s=together_s)


def _size(watch: Stopwatch, links: TierLinks, each_s: float) -> int:
    # As large as a few calls within the budget allow: a bus shares bandwidth, not latency.
    first = aligned(FIRST_BYTES, links.degree)
    first_s = watch.seconds(links.call("gather", first), each_s, agreed=True)
    times = max(1.0, each_s / 16 / first_s)
    return aligned(int(min(FIRST_BYTES * times, LARGEST_BYTES[watch.device.type])), links.degree)


def measure_disk(watch: Stopwatch, folder: Path, num_ranks: int) -> MediumSample:
    """Pass pieces and pages for about two seconds. Every rank must call this at the same point."""
    rate, pages = 0.0, (0.0, 0.0)
    with suppress(TerraceError):
        file = KeptFile(folder, [_PIECE_BYTES] * _NUM_PIECES)
        slots = make_slots(Keep().ring, _PIECE_BYTES, HOST)
        channel = Channel(file, Ledger(), "disk")
        rate = Ring(channel, range(_NUM_PIECES), slots, make_clock(HOST)).rate()
        rows = RowsOnDisk(_ROWS, channel, NO_CLOCK, UNPACED, 1, folder)
        pages = rows.page_rates()
        channel.close()
        rows.close()
    # One rank without a disk leaves all without.
    if -watch.largest(-rate) <= 0.0:
        return NO_MEDIUM
    free = os.statvfs(folder)
    free_bytes = -watch.largest(-float(free.f_bavail * free.f_frsize))
    reads, writes = map(watch.mean, pages)
    return MediumSample(
        bytes_per_s=watch.mean(rate),
        free_bytes=free_bytes,
        pages_read_per_s=reads,
        pages_written_per_s=writes,
        num_ranks=num_ranks,
    )


def measure_host(watch: Stopwatch, device: torch.device, num_ranks: int) -> MediumSample:
    """The same for the host's memory below a device with one of its own, and for updates on the host's cores."""
    if not has_streams(device):
        return NO_MEDIUM
    memory = HostMemory([_PIECE_BYTES] * _NUM_PIECES)
    channel = Channel(memory, Ledger(), "host")
    rate = Ring(channel, range(_NUM_PIECES), make_slots(Keep().ring, _PIECE_BYTES, device), make_clock(HOST)).rate()
    channel.close()
    free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return MediumSample(
        bytes_per_s=watch.mean(rate),
        free_bytes=-watch.largest(-float(free_bytes)),
        update_bytes_per_s=watch.mean(update_rate()),
        num_ranks=num_ranks,
    )
