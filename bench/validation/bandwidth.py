"""Measured bandwidths of nested groups on Frontier and Perlmutter, from the launcher of Singh et al. 2502.08145."""

import math

from bench.validation.rows import Row, Table, read_rows
from bench.validation.software import gather_s
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.simulate.links import rate_bytes_per_s

_NUM_NODES = 64
_MESSAGE_BYTES = 1e9  # large: the table has no sizes

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
Not bent to fit, so that it shows what the preset lacks. Inside a node the links differ by pair (50 or 100 GB/s) and the
preset has the lower figure for all: too low for groups that use several links at once, too high where a group of four
finds none. Beyond a node the source halves its nominal figures and the model stands at twice them. The limits guard
against change.
""",
}


def table(name: str, mean_limit: float, max_limit: float) -> Table:
    """Return the measured bandwidths of preset `name` beside the modelled ones."""
    cluster = load_cluster(name).resized(_NUM_NODES)
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
    return Table(
        title=f"AxoNN, nested groups on {name.capitalize()}",
        text=_TEXT.strip() + _NOTES[name],
        heads=("inner", "size", "degrees by tier"),
        unit="GB/s",
        rows=rows,
        mean_limit=mean_limit,
        max_limit=max_limit,
    )


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
    slowest = min(
        math.prod(group[:tier]) * rate_bytes_per_s(cluster, tier, num_bytes, degree=group[tier]) for tier in crossed
    )
    latency_s = max(cluster.tiers[tier].latency_s for tier in crossed)
    return (num_ranks - 1) * (latency_s + num_bytes / num_ranks / slowest) + cluster.device.kernels.launch_s
