"""Measured bandwidths of nested groups on Frontier and Perlmutter, from the launcher of Singh et al. 2502.08145."""

import math
import statistics
from dataclasses import replace

from bench.validation.rows import Row, Table, read_rows
from terrace.base.errors import ClusterError
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.cluster.wiring import num_links
from terrace.simulate.links import hop_s, rate_bytes_per_s

_NUM_NODES = 64
_MESSAGE_BYTES = 1e9  # large: the table has no sizes
# RCCL as those figures are of it: a channel an adapter, as the search of NCCL and RCCL finds (NCCL, issue 1041), before
# it has more of them. An all-gather over 8 nodes of LUMI, which are those of Frontier, reaches 41.9 GB/s a node with
# four channels and 82.3 with as many as it likes (aniskhan25/lumi-ai-assistant-demo, FINDINGS.md, RCCL 2.26).
_ONE_CHANNEL = {"frontier": 41.9 / 82.3}

_TEXT = """
GB/s of one device in a ring over `size` ranks, when the `inner` ranks inside belong to groups of another kind.
The model gives (g - 1)/g S / time for a gather of 1 GB, along one ring where that is faster than tier after tier: the
runtime, and the steps that are predicted, go tier after tier, while these figures are of rings.
"""
_NOTES = {
    "perlmutter": """
The source's figures beyond a node are nominal, 0.8 of four adapters dealt to the groups, and the preset assumes 0.8
as well: that they agree says that the sharing is the same, not that either is right. Those inside a node are measured.
""",
    "frontier": """
Inside a node the preset has every link, four, two or one by pair of GCDs. A ring runs along links of its own in both
directions: the eight GCDs have two cycles, four of them one, so that a group of four is slower than one of eight. These
rows taught that one rate for all pairs is no description of such a node; the links are RCCL's own model of it.

Beyond a node the preset has what RCCL reaches today, 82 of 100 GB/s. The rows are older, and half of that: the source
halves its nominal figures, and notes 34.0, 20.6 and 10.2 GB/s beside 40, 20 and 10. The rows are priced with one
channel an adapter, as was measured on the same nodes of LUMI. That RCCL had one then is concluded from these rows;
with the preset alone the last four kinds of groups are at twice their figures and the mean is {preset:.0%}.
""",
}


def table(name: str, mean_limit: float, max_limit: float) -> Table:
    """Return the measured bandwidths of preset `name` beside the modelled ones."""
    preset = load_cluster(name).resized(_NUM_NODES)
    rows = _rows(name, _with_channels(preset, _ONE_CHANNEL.get(name, 1.0)))
    today = statistics.fmean(abs(row.error) for row in _rows(name, preset))
    return Table(
        title=f"AxoNN, nested groups on {name.capitalize()}",
        text=_TEXT.strip() + _NOTES[name].format(preset=today),
        heads=("inner", "size", "degrees by tier"),
        unit="GB/s",
        rows=rows,
        mean_limit=mean_limit,
        max_limit=max_limit,
    )


def _with_channels(cluster: Cluster, part: float) -> Cluster:
    outermost = cluster.tiers[-1]
    return replace(cluster, tiers=(*cluster.tiers[:-1], replace(outermost, efficiency=part * outermost.efficiency)))


def _rows(name: str, cluster: Cluster) -> list[Row]:
    rows = []
    for line in read_rows("axonn_bandwidth.csv"):
        if line["cluster"] != name:
            continue
        inner = int(line["inner"].removeprefix(">="))
        size = 4 if line["size"] == "any" else int(line["size"].removeprefix(">="))
        group = nested(cluster, inner, size * (4 if line["size"].startswith(">=") else 1))
        rows.append(
            Row(
                cells=(line["inner"], line["size"], " x ".join(map(str, group))),
                published=float(line["gigabytes_per_s"]),
                modelled=_gigabytes_per_s(cluster, group),
            )
        )
    return rows


def nested(cluster: Cluster, inner: int, size: int) -> tuple[int, ...]:
    """Return the degrees by tier of a group of `size` ranks around `inner` ranks of another kind."""
    degrees = []
    for tier in cluster.tiers:
        used = min(inner, tier.size)
        inner = -(-inner // used)
        degrees.append(min(size, tier.size // used))
        size = -(-size // degrees[-1])
    return tuple(degrees)


def _gigabytes_per_s(cluster: Cluster, group: tuple[int, ...]) -> float:
    num_ranks = math.prod(group)
    seconds = min(gather_s(cluster, group, _MESSAGE_BYTES), ring_s(cluster, group, _MESSAGE_BYTES))
    return (num_ranks - 1) / num_ranks * _MESSAGE_BYTES / seconds / 1e9


def ring_s(cluster: Cluster, group: tuple[int, ...], num_bytes: float) -> float:
    """Seconds of a gather along one ring over all n ranks of a group of several, at the model's rates b_i of tiers.

    (n - 1) max latency_i + (n - 1)/n S / min over tiers of r_i b_i(S), r_i = g_1 ... g_(i-1): the ring crosses a tier
    at every boundary between members, with the links of all r_i ranks of the group inside a member.
    """
    num_ranks = math.prod(group)
    crossed = [tier for tier, degree in enumerate(group) if degree > 1]
    # The links of a node are all of its pairs', those inside its members too.
    within = [tier for tier in crossed if cluster.tiers[tier].links]
    slowest = min(_rate(cluster, group, tier, num_bytes) for tier in crossed if not within or tier >= within[0])
    latency_s = max(cluster.tiers[tier].latency_s for tier in crossed)
    return (num_ranks - 1) * (latency_s + num_bytes / num_ranks / slowest) + cluster.device.kernels.launch_s


def _rate(cluster: Cluster, group: tuple[int, ...], tier: int, num_bytes: float) -> float:
    """Rate at which all ranks of a group in one member of a tier send over it together."""
    inner, here = math.prod(group[:tier]), cluster.tiers[tier]
    rate = rate_bytes_per_s(cluster, tier, num_bytes, degree=group[tier])
    if here.links and inner > 1:
        # A ring over neighbours, all devices of each member among them.
        return rate / here.by_degree[group[tier] - 2] * num_links(here.links, tuple(range(inner * group[tier])))
    return inner * rate


def gather_s(cluster: Cluster, group: tuple[int, ...], num_bytes: float) -> float:
    """Seconds until every rank of a group holds all `num_bytes`, starting from one part each; as long as a reduction.

    `group` is the degrees of its ranks by tier. Hop after hop, as the messages of a program are priced. Raises
    `ClusterError` for a group that the cluster cannot hold.
    """
    sizes = tuple(tier.size for tier in cluster.tiers)
    if len(group) > len(sizes) or not all(1 <= degree <= size for degree, size in zip(group, sizes, strict=False)):
        raise ClusterError(f"a group of {group} ranks by tier: cluster {cluster.name!r} has {sizes}")
    total_s = 0.0
    for tier, degree in enumerate(group):
        if degree > 1 and num_bytes:
            total_s += hop_s(cluster, tier, degree, num_bytes * (degree - 1) / degree)
            # Each member of this tier brings 1 / degree of the bytes, gathered over the outer tiers.
            num_bytes /= degree
    return total_s + cluster.device.kernels.launch_s if total_s else 0.0
