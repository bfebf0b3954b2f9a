"""Seconds of a message on the tiers of a cluster: an alpha-beta model per tier.

A collective costs the sum of its hops, one tier after the other, as the runtime sends it (terrace.plan.hops). Among g
members of a tier whose rate for one rank is b, a hop that gathers or reduces S bytes takes

    (g - 1) latency + (g - 1)/g S / b(S)

along a ring, or the seconds of a tree if less (`Tier.tree`), as a library chooses by size and width.

A tier's bandwidth is the share of each device when all devices use the tier at the same time, on links of their own or
(`shared`) on one link for all ranks inside a member. Several groups with one rank per node each, such as the
data-parallel groups of different tensor ranks, therefore do not slow each other further.

Another software (terrace.cluster.named_software) may send along one ring over a whole group, copy what it sends, or
wait for it. A message that nothing hides has a penalty of 1: computing beside it takes longer by all of its time.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

from terrace.cluster.cluster import Cluster, Device, Tier
from terrace.cluster.software import OWN
from terrace.cluster.width import share
from terrace.plan.flats import FlatParamSpec
from terrace.plan.hops import Hop
from terrace.plan.wire import BETWEEN_STAGES, OF_PASSES, MessageClass
from terrace.simulate.kernels import memory_s

Group = Sequence[int]


def rate_bytes_per_s(cluster: Cluster, tier: int, num_bytes: float, *, degree: int = 0) -> float:
    """Rate of one rank over a tier, in bytes/s, in a message of `num_bytes` among `degree` members (0: all)."""
    here = cluster.tiers[tier]
    rate = here.bandwidth_bytes_per_s * wired(here, degree) * share(here.contention, degree or here.size)
    return rate * here.efficiency * (num_bytes / (num_bytes + here.half_bytes) if num_bytes else 1.0)


def wired(here: Tier, degree: int) -> float:
    """Share of a tier's bandwidth that `degree` members (0: all) can use: only the links among them count."""
    if here.by_degree:
        return here.by_degree[min(degree or here.size, len(here.by_degree) + 1) - 2] if degree != 1 else 1.0
    # Devices wired in pairs share their bandwidth among size - 1 links.
    if here.direct and degree > 1 and here.size > 1:
        return min(1.0, (degree - 1) / (here.size - 1))
    return 1.0


def hop_s(cluster: Cluster, tier: int, degree: int, num_bytes: float) -> float:
    """Seconds of a hop in which each of `degree` members of a tier sends `num_bytes` in total to the others.

    (degree - 1) latency + bytes / rate, at the rate of the whole message, or the seconds of a tree if less.
    """
    # The rate depends on the whole message, of which a rank sends all parts but one.
    whole = num_bytes * degree / (degree - 1) if degree > 1 else num_bytes
    rate = rate_bytes_per_s(cluster, tier, whole, degree=degree)
    ring_s = (degree - 1) * cluster.tiers[tier].latency_s + num_bytes / rate
    tree = cluster.tiers[tier].tree
    if tree is None or degree < 2:
        return ring_s
    return min(ring_s, tree.latency_s(degree) + num_bytes / (rate * tree.share))


def ring_s(cluster: Cluster, group: Group, num_bytes: float, bucketed: float = 1.0) -> float:
    """Seconds until every rank of a group holds all `num_bytes`, along one ring over all its ranks.

    `group` is the degrees of its ranks by tier. A ring crosses a tier of `degree` members once for every member; all
    adapters of a node carry rings at once. The parts cross the tiers together, at the rate of the slowest, and a step's
    latency is that of the tier that it crosses. A reduction takes as long. `bucketed`: the share of the latencies that
    falls to these bytes, where they travel with others.
    """
    num_ranks = math.prod(group)
    if num_ranks == 1 or not num_bytes:
        return 0.0
    seconds, latency_s, outer = 0.0, 0.0, 1
    for tier, degree in reversed(list(enumerate(group))):
        if degree == 1:
            continue
        inner = math.prod(group[:tier])
        # Members leave by as many links as they have ranks, each with an equal part of the bytes.
        rate = inner * rate_bytes_per_s(cluster, tier, num_bytes / inner, degree=degree)
        seconds = max(seconds, num_bytes * (num_ranks - 1) / num_ranks / rate)
        latency_s += outer * (degree - 1) * cluster.tiers[tier].latency_s
        outer *= degree
    return seconds + bucketed * latency_s + cluster.device.kernels.launch_s


def hops_s(
    cluster: Cluster,
    hops: Sequence[Hop],
    coding_bytes: float,
    message_class: MessageClass | None = None,
    sharded: bool = False,
) -> tuple[float, float]:
    """(Seconds of a message, its slow-down of compute averaged over its time on each tier), coding included.

    `sharded`: parameters of the ranks that exchange it are gathered for use.
    """
    if cluster.device.software == OWN:
        return with_coding(cluster, coding_bytes, [_hop(cluster, hop) for hop in hops])
    rings, runs = cluster.device.software.messages.rings, list(_runs(hops))
    parts = [_ring(cluster, run) if rings and len(run) > 1 else map(partial(_hop, cluster), run) for run in runs]
    seconds, penalty = with_coding(cluster, coding_bytes, chain(*parts))
    exposed = message_class is not None and is_exposed(cluster, message_class, sharded)
    return seconds, 1.0 if exposed else penalty


def is_exposed(cluster: Cluster, message_class: MessageClass, sharded: bool = False) -> bool:
    """Whether the cluster's software waits for messages of a class wherever they are sent; `sharded` as in `hops_s`."""
    form = cluster.device.software.messages
    return message_class in form.exposed or (not sharded and message_class in form.exposed_unsharded)


def waits_for_sends(cluster: Cluster, message_class: MessageClass, alone: bool) -> bool:
    """Whether a stage computes nothing while it sends; `alone`: every stage has one chunk of blocks."""
    form = cluster.device.software.messages
    return message_class in form.exposed or (alone and form.waits_for_sends and message_class in BETWEEN_STAGES)


def _tier(hop: Hop) -> int:
    return hop.tier


def _hop(cluster: Cluster, hop: Hop) -> tuple[float, float]:
    return hop_s(cluster, hop.tier, hop.degree, hop.sent_bytes), tier_penalty(cluster, hop.tier)


def _runs(hops: Sequence[Hop]) -> Iterator[list[Hop]]:
    """The hops of each reduction, outward, and of each gather, inward."""
    run: list[Hop] = []
    for hop in hops:
        turns = len(run) > 1 and (hop.tier > run[-1].tier) != (run[-1].tier > run[-2].tier)
        if run and (hop.tier == run[-1].tier or turns):
            yield run
            run = []
        run.append(hop)
    if run:
        yield run


def _ring(cluster: Cluster, run: Sequence[Hop]) -> list[tuple[float, float]]:
    """(Seconds, penalty) of a reduction or a gather along one ring."""
    inmost, outmost = min(run, key=_tier), max(run, key=_tier)
    group = [1] * (outmost.tier + 1)
    for hop in run:
        group[hop.tier] = hop.degree
    least, each = cluster.device.software.messages.bucket
    bucket = max(least, each * math.prod(group))
    numel = inmost.degree * inmost.pieces * inmost.numel
    bucketed = min(1.0, numel / bucket) if bucket else 1.0
    seconds = ring_s(cluster, group, inmost.degree * inmost.part_bytes, bucketed)
    # A kernel of the library serves the links of all ranks inside a member, on each of them.
    inner = math.prod(group[: outmost.tier])
    return [(seconds, min(tier_penalty(cluster, inmost.tier), inner * tier_penalty(cluster, outmost.tier)))]


def copied_s(device: Device, message_class: MessageClass, span: int) -> float:
    """Seconds of the copies around a message of parameters or gradients, for each element of the whole.

    `span` ranks have a shard each. The copies are computing: nothing hides them.
    """
    form = device.software.messages
    copies = {MessageClass.REDUCE: form.reduce_copies}.get(message_class, form.gather_copies)
    if message_class not in OF_PASSES or span == 1 or not any(copies):
        return 0.0
    return memory_s(device, copies[0] + copies[1] / span, 0)


def copies_s(device: Device, flats: Sequence[FlatParamSpec], unit: int) -> tuple[float, float]:
    """Seconds of copies around the messages of a block with these flat buffers: in a forward, and in its backward.

    `unit` micro-batches share a gather and a reduction.
    """
    forward_s = backward_s = 0.0
    for flat in flats:
        layout, numel = flat.layout, flat.padded / unit
        gather_s = numel * copied_s(device, MessageClass.GATHER, layout.span(layout.params))
        forward_s += gather_s
        backward_s += gather_s if layout.frees else 0.0
        if flat.trainable:
            backward_s += numel * copied_s(device, MessageClass.REDUCE, layout.span(layout.grads))
    return forward_s, backward_s


def with_coding(cluster: Cluster, coding_bytes: float, parts: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(Seconds, mean penalty) of parts of a message, (seconds, penalty) each, and of its coding."""
    # Coding runs on the device itself, so the device's penalty applies to it.
    total_s = coding_s(cluster, coding_bytes) if coding_bytes else 0.0
    slowed_s = cluster.device.overlap_penalty * total_s
    for seconds, penalty in parts:
        total_s += seconds
        slowed_s += seconds * penalty
    return total_s, slowed_s / total_s if total_s else 0.0


def exchange_tiers(cluster: Cluster, degrees: Group, sends: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Seconds by tier index of an exchange in which each rank sends `sends`, pairs of (tier, bytes).

    Messages to all peers start together, so a tier's latency counts once; tiers follow each other. The launch is
    charged to the first tier.
    """
    found: dict[int, float] = {}
    launch_s = cluster.device.kernels.launch_s
    for tier, num_bytes in sends:
        rate = rate_bytes_per_s(cluster, tier, num_bytes, degree=degrees[tier])
        found[tier] = launch_s + cluster.tiers[tier].latency_s + num_bytes / rate
        # One launch starts the messages of all tiers.
        launch_s = 0.0
    return found


def tier_penalty(cluster: Cluster, tier: int) -> float:
    """Slow-down of compute while a message is on a tier, as a share of the message's time."""
    # A tier without a penalty uses the device's.
    own = cluster.tiers[tier].overlap_penalty
    return cluster.device.overlap_penalty if own is None else own


def send_s(cluster: Cluster, tier: int, num_bytes: float) -> float:
    """Seconds of a point-to-point message of `num_bytes` across a tier."""
    if not num_bytes:
        return 0.0
    here = cluster.tiers[tier]
    rate = rate_bytes_per_s(cluster, tier, num_bytes, degree=2)
    return here.latency_s + num_bytes / rate + cluster.device.kernels.launch_s


def coding_s(cluster: Cluster, num_bytes: float) -> float:
    """Seconds of coding and decoding that read and write `num_bytes` of memory."""
    # The codec occupies the rank, not a tier.
    return num_bytes / (cluster.device.memory_bandwidth_bytes_per_s * cluster.device.kernels.codec)


def latency_and_rate(small_bytes: float, small_s: float, large_bytes: float, large_s: float) -> tuple[float, float]:
    """(Latency in seconds, bandwidth in bytes/s) from the seconds of a small and a large message to one neighbour."""
    if large_s <= small_s:  # noise hides the slope: all of the larger message's time counts as bandwidth
        return 0.0, large_bytes / large_s
    bandwidth = (large_bytes - small_bytes) / (large_s - small_s)
    return max(0.0, small_s - small_bytes / bandwidth), bandwidth
