"""Offers of machines side by side: a table, the answer in words, and a page with costs over days."""

import math
from collections.abc import Sequence

from terrace.base.printable import escape
from terrace.base.words import counted, quantity, seconds
from terrace.planner.rent import Market, Rented, ties_with
from terrace.report.markup import figure, legend
from terrace.report.plans import percent as with_decimal
from terrace.report.sections import Page, Section
from terrace.report.svg import open_chart
from terrace.report.table import Table
from terrace.report.training_cost import duration
from terrace.simulate.bands import percent

_BEYOND = {"days": "over the day limit", "offer": "over the offer's days", "money": "over the cost limit"}
_LEFT = ("offer", "remark")
# Keys of the palette that differ on light and on dark paper; further offers begin anew.
_COLOURS = ("forward", "gather", "update", "reduce", "sync", "gather_backward", "refresh", "backward")
_WIDTH, _HEIGHT, _START, _END, _TOP, _BASE = 1080, 470, 90, 20, 28, 50
_FEWEST_TICKS = 3


def market_table(market: Market) -> Table:
    """A row for each offer and size, in the order of the file."""
    fails = any(row.goodput != 1 for row in market.rows)
    goodput, energy = ["goodput"] * fails, ["energy"] * any(row.energy_kwh for row in market.rows)
    cost = ["days", _cost_heading(market)]
    headings = ["offer", "nodes", "devices", "step", "band", "memory", *goodput, *cost, *energy, "remark"]
    rows = []
    for row in market.rows:
        start = [row.name, str(row.num_nodes), f"{row.num_devices:,}"]
        if row.reason:
            rows.append([*start, *("-" for _ in headings[3:-1]), "does not run"])
            continue
        cells = [seconds(row.step_s), f"+-{percent(row.share)}", quantity(row.memory_bytes, "B")]
        cells += [with_decimal(row.goodput) if row.goodput != 1 else "-"] * fails
        cells += [_days(row.days), money(row.cost)]
        cells += [quantity(1e3 * row.energy_kwh, "Wh") if row.energy_kwh else "-"] * len(energy)
        rows.append([*start, *cells, remark(market, row)])
    return Table(headings=headings, left=_LEFT, rows=rows)


def remark(market: Market, row: Rented) -> str:
    """Why a row is chosen, or what excludes it: its limit, cheapest, soonest, frontier, tie."""
    if beyond := market.excess(row):
        return _BEYOND[beyond]
    best = {"cheapest": market.cheapest, "soonest": market.soonest}
    names = [name for name, each in best.items() if each is row]
    if not names and any(each is row for each in market.frontier):
        names = ["frontier"]
    if market.cheapest is not None and any(each is row for each in ties_with(market.cheapest, market.allowed)):
        names.append("ties with the cheapest")
    return ", ".join(names)


def answer_words(market: Market) -> str:
    """What to rent: the cheapest row and those that tie with it, the soonest one, and the limits."""
    cheapest, soonest = market.cheapest, market.soonest
    if cheapest is None or soonest is None:
        running = [row for row in market.rows if not row.reason]
        if not running:
            return "the model runs on none of these machines"
        least, first = min(running, key=lambda row: row.cost), min(running, key=lambda row: row.days)
        return (
            f"no offer is within {_limits(market)}: the least cost is {_cost(market, least)} in {_when(least)} on "
            f"{_where(least)}, the shortest time {_when(first)} for {_cost(market, first)} on {_where(first)}"
        )
    lines = [f"rent {_where(cheapest)}: {_cost(market, cheapest)} (+-{percent(cheapest.share)}) in {_when(cheapest)}"]
    lines[0] += f", the cheapest within {_limits(market)}" if _limits(market) else ", the cheapest"
    if tied := ties_with(cheapest, market.allowed):
        named = "; ".join(f"{_where(row)}, {_cost(market, row)} in {_when(row)}" for row in tied)
        lines.append(f"predictions cannot tell its cost from that of {named}")
    if soonest is not cheapest:
        more = soonest.cost / cheapest.cost - 1
        lines.append(f"soonest: {_where(soonest)}, {_when(soonest)} for {_cost(market, soonest)}, {percent(more)} more")
    lines.append(f"plan of {_where(cheapest)}: {cheapest.plan}")
    return "\n".join(lines)


def reasons_words(market: Market) -> str:
    """A line for each row that does not run."""
    return "\n".join(f"{_where(row)}: {row.reason}" for row in market.rows if row.reason)


def market_page(market: Market, subtitle: str) -> Page:
    """The table and the answer, with the chart of cost against days."""
    cheapest, soonest = market.cheapest, market.soonest
    figures = []
    if cheapest is not None and soonest is not None:
        figures = [
            (_cost(market, cheapest), f"least cost, {_where(cheapest)}"),
            (_when(soonest), f"shortest time, {_where(soonest)}"),
        ]
    chart = Section(
        title="cost against time", body=market_chart(market) if any(not row.reason for row in market.rows) else ""
    )
    about = Section(title="what does not run", words=reasons_words(market).splitlines())
    return Page(
        title="what to rent",
        subtitle=subtitle,
        figures=figures,
        lead=answer_words(market).splitlines(),
        sections=[chart, Section(title="all offers", table=market_table(market)), about],
    )


def market_chart(market: Market) -> str:
    """Cost over days, both in powers: a dot for each row with its band, the frontier as a line, limits dashed."""
    rows = [row for row in market.rows if not row.reason]
    days = _Axis([row.days for row in rows], _START, _WIDTH - _END)
    cost = _Axis([each for row in rows for each in _around(row)], _HEIGHT - _BASE, _TOP)
    names = list(dict.fromkeys(row.name for row in market.rows))
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}
    parts = [open_chart(_HEIGHT, "cost against days")]
    for tick in days.ticks:
        x = days.place(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{_HEIGHT - _BASE}"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BASE + 18}" text-anchor="middle">{tick:,g}</text>')
    for tick in cost.ticks:
        y = cost.place(tick)
        parts.append(f'<path class="grid" d="M{_START} {y:.1f}H{_WIDTH - _END}"/>')
        parts.append(f'<text x="{_START - 8}" y="{y + 4:.1f}" text-anchor="end">{money(tick)}</text>')
    parts.append(f'<text x="{(_START + _WIDTH) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">days</text>')
    parts.append(f'<text x="{_START}" y="14">{escape(_cost_heading(market))}</text>')
    if days.first < market.days < days.last:
        parts.append(f'<path class="limit" d="M{days.place(market.days):.1f} {_TOP}V{_HEIGHT - _BASE}"/>')
    if cost.first < market.money < cost.last:
        parts.append(f'<path class="limit" d="M{_START} {cost.place(market.money):.1f}H{_WIDTH - _END}"/>')
    if line := " ".join(f"{days.place(row.days):.1f},{cost.place(row.cost):.1f}" for row in market.frontier):
        parts.append(f'<polyline points="{line}" fill="none" stroke="var(--ink)" stroke-width="2"/>')
    for row in rows:
        parts.append(_dot(market, row, days, cost, colours[row.name]))
    parts.append("</svg>")
    caption = (
        "Both axes are logarithmic. A dot is an offer at one size, with its number of nodes; the stroke through it is "
        "the band of the prediction. The line joins the ringed dots, which no other beats in both cost and time; "
        "dashed lines are limits, and faint dots are beyond one."
    )
    return figure("".join(parts), legend([(name, f"--c-{colours[name]}", "") for name in names]), caption)


def _dot(market: Market, row: Rented, days: "_Axis", cost: "_Axis", colour: str) -> str:
    x, (low, high) = days.place(row.days), (cost.place(each) for each in _around(row))
    faint = ' opacity=".35"' if market.excess(row) else ""
    ring = ' stroke="var(--ink)" stroke-width="2"' if any(each is row for each in market.frontier) else ""
    title = f"{_where(row)}: {_cost(market, row)} in {_when(row)}, step {seconds(row.step_s)} +-{percent(row.share)}"
    return (
        f'<g{faint}><path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="var(--c-{colour})" stroke-width="1.5"/>'
        f'<circle cx="{x:.1f}" cy="{cost.place(row.cost):.1f}" r="5" fill="var(--c-{colour})"{ring}>'
        f"<title>{escape(title)}</title></circle>"
        f'<text x="{x + 8:.1f}" y="{cost.place(row.cost) - 7:.1f}">{row.num_nodes}</text></g>'
    )


def _around(row: Rented) -> tuple[float, float]:
    return row.cost / (1 + row.share), row.cost * (1 + row.share)


class _Axis:
    """A logarithmic axis over values, from one unit to another.

    It has ticks at 1, 2 and 5 of each power of ten, closer ones where these are few.
    """

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.first, self.last = min(values) / 1.15, max(values) * 1.15
        self._start, self._end = start, end
        powers = range(math.floor(math.log10(self.first)), math.ceil(math.log10(self.last)) + 1)
        for factors in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(1 + place / 10 for place in range(90))):
            found = [factor * 10.0**power for power in powers for factor in factors]
            self.ticks = [tick for tick in found if self.first <= tick <= self.last]
            if len(self.ticks) >= _FEWEST_TICKS:
                break

    def place(self, value: float) -> float:
        share = math.log(value / self.first) / math.log(self.last / self.first)
        return self._start + share * (self._end - self._start)


def money(value: float) -> str:
    """An amount with three significant digits, or to the whole unit below a million."""
    return (
        f"{value:,.0f}" if 100 <= value < 1e6 else f"{quantity(value, '').strip()}" if value >= 1e6 else f"{value:.3g}"
    )


def _cost_heading(market: Market) -> str:
    return ", ".join(filter(None, ("cost", market.currency)))


def _cost(market: Market, row: Rented) -> str:
    return f"{money(row.cost)} {market.currency}".strip()


def _days(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _when(row: Rented) -> str:
    return duration(86400 * row.days)


def _where(row: Rented) -> str:
    return f"{row.name}, {counted(row.num_nodes, 'node')}"


def _limits(market: Market) -> str:
    limits = [f"{market.days:g} days"] * math.isfinite(market.days)
    if math.isfinite(market.money):
        limits.append(f"{money(market.money)} {market.currency}".strip())
    if any(math.isfinite(row.offer.days) for row in market.rows):
        limits.append("the days of each offer")
    return " and ".join(filter(None, (", ".join(limits[:-1]), *limits[-1:])))
