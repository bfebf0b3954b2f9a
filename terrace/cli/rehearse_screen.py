"""What the user of `terrace rehearse` sees."""

from rich import box
from rich.table import Table

from terrace.rehearse import Wiring
from terrace.rehearse.counters import Counts
from terrace.report.tables import quantity


def counts_table(wiring: Wiring, carried: Counts) -> Table:
    """Return what every tier carried: over all ranks, by rank, and over shared uplinks."""
    title = f"bytes sent on cluster {wiring.cluster.name} at scale {wiring.scale:g}, headers included"
    table = _table(title, "tier", "all ranks", "mean of a rank", "most of a rank", "uplinks", last_left=True)
    for tier in carried.tiers:
        sent = [rank.sent_bytes for rank in tier.ranks]
        links = [f"{_ranks(ranks)}: {quantity(link.sent_bytes, 'B')}" for ranks, link in tier.uplinks]
        figures = (tier.sent_bytes, sum(sent) / len(sent), max(sent))
        table.add_row(tier.name, *(quantity(round(figure), "B") for figure in figures), ", ".join(links))
    return table


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def _table(title: str, *headings: str, last_left: bool = False) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        min_width=len(title) + 2,  # a narrower table would break its title into lines
    )
    for place, heading in enumerate(headings):
        left = place == 0 or (last_left and place == len(headings) - 1)
        table.add_column(heading, justify="left" if left else "right")
    return table
