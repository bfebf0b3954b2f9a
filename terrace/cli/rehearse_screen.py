"""Tables and notes printed by `terrace rehearse`."""

from functools import partial

from rich.table import Table

from terrace.rehearse import Wiring
from terrace.rehearse.counters import Counts
from terrace.rehearse.measure import Figure, Way
from terrace.rehearse.wiring import SHORTEST_DELAY_S
from terrace.report.tables import new_table, quantity, seconds

_WAYS = {
    Way.LATENCY: "small message, one way",
    Way.PAIR: "one pair alone",
    Way.UPLINK: "one group's uplink, all its ranks sending",
    Way.ALL_REDUCE: "a rank's share, all-reduce everywhere",
}


def counts_table(wiring: Wiring, carried: Counts) -> Table:
    """Bytes sent over each tier: in total, by rank, and over shared uplinks."""
    title = f"bytes sent on cluster {wiring.cluster.name} at scale {wiring.scale:g}, headers included"
    headings = ("tier", "all ranks", "mean of a rank", "most of a rank", "uplinks")
    table = new_table(title, headings, left=("tier", "uplinks"))
    for tier in carried.tiers:
        sent = [rank.sent_bytes for rank in tier.ranks]
        links = [f"{_ranks(ranks)}: {quantity(link.sent_bytes, 'B')}" for ranks, link in tier.uplinks]
        figures = (tier.sent_bytes, sum(sent) / len(sent), max(sent))
        table.add_row(tier.name, *(quantity(round(figure), "B") for figure in figures), ", ".join(links))
    return table


def figures_table(wiring: Wiring, found: list[Figure]) -> Table:
    """Configured and measured figures of `terrace rehearse check`."""
    title = f"cluster {wiring.cluster.name} at scale {wiring.scale:g}: configured and measured"
    headings = ("tier", "measured is", "configured", "measured", "deviation")
    table = new_table(title, headings, left=("tier", "measured is"))
    for figure in found:
        show = seconds if figure.way == Way.LATENCY else partial(quantity, unit="B/s")
        none = "the kernel's own" if figure.way == Way.LATENCY else "not limited"
        configured = none if figure.configured is None else show(figure.configured)
        deviation = "" if figure.deviation is None else f"{100 * figure.deviation:+.1f} %"
        # Latency is a tier's first row: a rule separates tiers.
        if figure.way == Way.LATENCY and table.row_count:
            table.add_section()
        table.add_row(figure.tier, _WAYS[figure.way], configured, show(figure.measured), deviation)
    return table


def lost_delays(wiring: Wiring, lost: tuple[str, ...]) -> list[str]:
    """One line for each tier without its emulated latency, with the reason."""
    lines = []
    for net in wiring.nets:
        wanted = seconds(net.tier.latency_s)
        if net.tier.name in lost:
            lines.append(f"the latency of tier {net.tier.name}, {wanted}, is not added: this kernel has no netem")
        elif 0 < net.tier.latency_s < SHORTEST_DELAY_S:
            lines.append(
                f"the latency of tier {net.tier.name}, {wanted}, is the kernel's own: below "
                f"{seconds(SHORTEST_DELAY_S)} none is added"
            )
    return lines


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
